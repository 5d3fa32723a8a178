"""Whatever is typed behind a command that it can't use: one sentence, exit code 2, soon."""

import subprocess
import sys
import time
from importlib.metadata import version

import pytest

from tokendrop.cli.main import all_commands, main

GARBAGE = ["", "\0", "nan", "1e18", "-1", "0", "²", "9" * 5000, "x" * 5000, "a\ud800b", "\n", "--", "--no-such"]
RUN = ("evaluate", "nowhere")
SENTENCES = {
    (*RUN, "--limit", "0"): "--limit: want a whole number of at least 1, got '0'; see tokendrop evaluate --help",
    (*RUN, "--limit", "-3"): "--limit: want a whole number of at least 1, got '-3'",
    (*RUN, "--limit", "1e3"): "--limit: want a whole number of at least 1, got '1e3'",
    (*RUN, "--limit", "9" * 5000): f"--limit: want a whole number of at least 1, got '{'9' * 80}...'",
    (*RUN, "--tasks", ",,"): "--tasks: want names such as lambada_openai,piqa; got ',,'",
    (*RUN, "--tasks", ""): "--tasks: want names such as lambada_openai,piqa; got ''",
    (*RUN, "--tasks", f"piqa,{'x' * 300}"): "--tasks: want a path of less than 4096 bytes, and 255 in each name",
    ("evaluate", "a\0b"): "RUN_OR_CHECKPOINT: want a path without NUL, got a?b",
    ("export", "nowhere", "--to", "n" * 300): "--to: want a path of less than 4096 bytes",
    ("export", "nowhere"): "the following arguments are required: --to; see tokendrop export --help",
    ("generate", "nowhere", "--top-p", "1.5"): "--top-p: want a number from 0 to 1, got '1.5'; see tokendrop generate",
    ("generate", "nowhere", "--temperature", "nan"): "--temperature: want a number from 0 to 100, got 'nan'",
    ("generate", "nowhere", "--top-k", "0"): "--top-k: want a whole number of at least 1, got '0'",
    ("train", "--resume", "a\0b"): "--resume: want a path without NUL, got a?b",
    ("train", "--resume", "http://host/run"): "--resume: want a path that all workers share, s3://BUCKET/PREFIX or gs",
    ("evaluate", "s3://bucket"): "s3://bucket: want the address of a run, such as s3://bucket/NAME",
    ("watch", "s3://bucket/runs/one"): "RUN: want a path on this machine, got 's3://bucket/runs/one'",
    ("profile", "x.yaml", "--out", "\ud800.yaml"): "--out: want a path of UTF-8 text, got ?.yaml",
    ("cluster", "up", "--cpus-per-node", "many"): "--cpus-per-node: invalid int value: 'many'",
    ("plan", "x.yaml", "--no-such"): "unrecognized arguments: --no-such; see tokendrop plan --help",
    ("train", "train.length=5"): "train: want a job file before the overrides, got 'train.length=5'",
    ("plan",): "the following arguments are required: job; see tokendrop plan --help",
    ("fly",): "COMMAND: invalid choice: 'fly'",
    (): "the following arguments are required: COMMAND; see tokendrop --help",
}


@pytest.mark.parametrize(
    "arguments", SENTENCES, ids=lambda arguments: " ".join(arguments)[:40].encode("unicode_escape")
)
def test_an_argument_that_is_wrong_is_named(complaint, arguments):
    assert complaint(*arguments).startswith(SENTENCES[arguments])


def test_with_json_a_mistake_is_told_the_same_way(complaint):
    assert complaint("plan", "nowhere.yaml", "--json") == complaint("plan", "nowhere.yaml")


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda text: ascii(text)[:12])
@pytest.mark.parametrize("command", [command.name for command in all_commands() if command.name != "cluster up"])
def test_garbage_behind_a_command_is_one_sentence(complaint, monkeypatch, tmp_path, command, garbage):
    """Where it says `no such`; a command that takes nothing is given nothing that it could take."""
    monkeypatch.chdir(tmp_path)
    needed = {"export": ["--to", garbage], "data show": ["--sample", "0"]}.get(command, [])
    given = ["--no-such", garbage] if command.startswith("cluster") else [garbage]
    since = time.monotonic()
    said = complaint(*command.split(), *given, *needed)
    assert len(said) < 1000
    assert time.monotonic() - since < 20  # the first use of lm-eval takes some of them


def test_an_error_that_nobody_expected_tells_no_secret():
    code = (
        "from tokendrop.cli.main import main\nsecret = 'hid' + 'den1'\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    )
    code += "raise RuntimeError(f'https://user:{secret}@host is away')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: https://<hidden>@host is away\n")


def test_the_version_is_that_of_the_package(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"tokendrop {version('tokendrop')}\n"
