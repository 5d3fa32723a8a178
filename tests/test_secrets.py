"""What is a secret in a text, and what is not."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.errors import UserError, first_line
from tokendrop.secrets import HIDDEN, redact, redact_all, restored

HIDES = {
    "https://user:pass@host/x": "https://<hidden>@host/x",
    "https://user:p@ss@host:80/x": "https://<hidden>@host:80/x",
    "https://ghptoken@host": "https://<hidden>@host",
    "postgresql+psycopg2://u:p@h/db": "postgresql+psycopg2://<hidden>@h/db",
    "s3://key:secret@bucket/a*.jsonl?region=eu": "s3://<hidden>@bucket/a*.jsonl?region=eu",
    "s3://key:sec/ret@bucket/a@b": "s3://<hidden>@b",
    "http://user:pass word@host/x": "http://<hidden>@host/x",
    "http://user:pa?s#@host/x": "http://<hidden>@host/x",
    "s3://b/x?access_key=AB&secret_key=CD&region=eu": "s3://b/x?access_key=<hidden>&secret_key=<hidden>&region=eu",
    "(see https://h/x?token=abc), then": "(see https://h/x?token=<hidden>), then",
    "https://h/x?X-Amz-Signature=1f&X-Amz-Date=2": "https://h/x?X-Amz-Signature=<hidden>&X-Amz-Date=2",
    "https://h/x?sv=1&sig=a%2Fb%3D": "https://h/x?sv=1&sig=<hidden>",
    "{'Authorization': 'Bearer abcdef'}": "{'Authorization': 'Bearer <hidden>'}",
    "no access for hf_abcdefghijklmnopqrst there": "no access for <hidden> there",
    "AKIAIOSFODNN7EXAMPLE is not known": "<hidden> is not known",
    '["s3://a:b@c/x", "s3://d:e@f/y"]': '["s3://<hidden>@c/x", "s3://<hidden>@f/y"]',
}
LEAVES = [
    "http://127.0.0.1:5000/#/experiments/1",
    "http://host:8000/data@v2/x.jsonl",
    "http://127.0.0.1:8265 is away; write to a@b",
    "hf://datasets/me/corpus@main/x.parquet",
    "abfs://container@account.dfs.core.windows.net/x",
    "hdfs://user@namenode:8020/x",
    "postgresql://user@host/db",
    "gs://anonymous@bucket/x",
    "sqlite:////tmp/a:b@c/mlflow.db",
    "file:///tmp/key:value@x",
    "s3://bucket/x?endpoint_override=127.0.0.1%3A80&scheme=http",
    "override 'foo': want key=value, such as train.length=100",
    "tokens: 500, tokenizer=x.json",
    "data/**/*.jsonl",
]


@pytest.mark.parametrize("text", HIDES)
def test_a_secret_is_hidden_and_the_rest_stays(text: str) -> None:
    assert redact(text) == HIDES[text]


@pytest.mark.parametrize("text", LEAVES)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


safe = st.text(st.characters(codec="ascii", exclude_characters="/?#@:", categories=["L", "N", "P", "S"]), min_size=3)
words = st.text(max_size=20).filter(lambda text: "@" not in text)


@given(words, safe, safe, words)
def test_no_password_is_seen_in_any_text(before: str, user: str, password: str, after: str) -> None:
    uri = f"https://{user}:{password}@host/path"
    said = redact(f"{before} {uri} {after}")
    assert said.startswith(redact(before + " https://")) or HIDDEN in said
    assert f"{user}:{password}" not in said
    assert f"https://{HIDDEN}@host/path" in said


@given(st.text(max_size=60) | st.text("abc:/@?&=#token <>'", max_size=60))
def test_what_is_redacted_stays_so(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MY_PASSWORD", "HF_TOKEN", "api_key"])
def test_values_of_secret_variables_are_hidden_wherever_they_are(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "wJalr/XUtnFEMI")
    assert redact("denied to 'wJalr/XUtnFEMI'.") == "denied to '<hidden>'."


@pytest.mark.parametrize(("name", "value"), [("KEY", "x"), ("KEYBOARD", "something long"), ("PWD", "/tmp/somewhere")])
def test_values_of_other_variables_stay(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"see {value}") == f"see {value}"


def test_texts_in_trees_are_redacted() -> None:
    tree = {"https://a:b@c": [1, ("https://a:b@c", None)]}
    assert redact_all(tree) == {"https://<hidden>@c": [1, ("https://<hidden>@c", None)]}


def test_errors_tell_no_secret() -> None:
    assert str(UserError("https://user:pass@host: no")) == "https://<hidden>@host: no"
    long = "x" * 110
    assert "pass" not in first_line(ValueError(f"{long} https://user:password@host/"))


def test_what_was_hidden_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    s3, tracked = "s3://<hidden>@b/x?secret_key=<hidden>&region=eu", "https://<hidden>@host"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert restored(s3, is_tracking=False) is None
    assert restored(tracked, is_tracking=True) is None
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert restored(s3, is_tracking=False) == "s3://b/x?region=eu"
    assert restored(tracked, is_tracking=True) is None
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "something")
    assert restored(tracked, is_tracking=True) == "https://host"
    assert restored(tracked, is_tracking=False) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:mine@host")
    assert restored(tracked, is_tracking=True) == "https://me:mine@host"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["=" + "a" * 10**5, "a://b:x" + "y" * 10**5, "?" + "a" * 10**5, "a://" * 10**5, "://@" * 10**5, "?key" * 10**5],
)
def test_a_long_text_is_looked_through_in_one_go(text: str) -> None:
    assert redact(text)


CONNECT = """
import sys
import psutil
from tokendrop.launch import cluster
cluster._hide_secrets()
print(psutil.Process().cmdline())
"""


@pytest.mark.parametrize("uri", ["https://user:password@host", "https://host"])
def test_a_drivers_command_line_shows_no_secret(uri: str):
    command = [sys.executable, "-c", CONNECT, f"track.uri={uri}", "train.length=3 steps"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "password" not in shown
    assert "train.length=3 steps" in shown
    assert ("<hidden>@host" in shown) == ("password" in uri)
