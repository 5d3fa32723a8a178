"""Passwords, keys and tokens, kept out of all that is written, said or shown."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"
"""Stands where a secret was. No URI and no token may hold it, so what was redacted is never taken for whole."""

_PORT = r"""(?!\d{1,5}(?:[/?#\s'"),;\]]|$))"""
_URI = re.compile(
    r"(?<![A-Za-z0-9+.\-])(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]{0,30})://"
    r"(?:(?P<user>[^/?#\s]{0,2048})@"  # as URIs should be: all up to the last @ before the path
    rf"|[^/@?#\s]{{0,2048}}:{_PORT}(?:(?!://)\S){{0,2048}}@"  # a secret that is not percent-encoded, with a slash
    rf"|[^/@?#\s]{{0,2048}}:{_PORT}(?:(?!://)[^\n]){{0,2048}}?@)"  # or with a space
)
_QUERY = re.compile(
    r"(?P<name>[?&;#][\w.\-]{0,64}?(?:token|secret|passw(?:or)?d|pwd|passphrase|credential|signature|key)[\w.\-]{0,64}="
    r"|[?&;]sig=)"
    r"""(?P<value>[^&\s"'#]+)""",
    re.IGNORECASE,
)
_HEADER = re.compile(r"""(?P<name>authorization['"]?\s*[:=]\s*['"]?(?:\w+\s+)?)[^\s'",]+""", re.IGNORECASE)
# of Hugging Face, GitHub, GitLab, Google and AWS, which begin all of theirs alike
_TOKEN = re.compile(
    r"\b(?:(?:hf_|gh[oprsu]_|github_pat_|glpat-|ya29\.)[\w.\-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b)", re.ASCII
)
_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|KEY|CREDENTIALS?)$|ACCESS_KEY_ID$", re.IGNORECASE
)
_SHORTEST = 8  # of a variable's value; shorter ones stand in too many words
_FOLDERS = ("PWD", "OLDPWD")  # variables of every shell

# of these schemes a user alone, without a password, is a name; of others it is a token
_NAMED = re.compile(r"(?:hdfs|viewfs|abfss?|wasbs?|ssh|sftp|ftp|postgres(?:ql)?|mysql|mariadb|mssql|oracle)(?:\+\w+)?$")

# what a store's own library looks for in the environment, where a URI leaves it out
_VARIABLES: dict[str, Sequence[Sequence[str]]] = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_PROFILE",)),
    "gs": (("GOOGLE_APPLICATION_CREDENTIALS",),),
    "gcs": (("GOOGLE_APPLICATION_CREDENTIALS",),),
    "hf": (("HF_TOKEN",),),
}
_TRACKING = (("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"), ("MLFLOW_TRACKING_TOKEN",))


def redact(text: str) -> str:
    """A text without its secrets: users and passwords of URIs, keys in their queries, tokens, values of variables.

    A text that was redacted stays as it is.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and name not in _FOLDERS and _VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    text = _QUERY.sub(_without_value, _URI.sub(_without_user, text)) if "://" in text or "=" in text else text
    return _TOKEN.sub(HIDDEN, _HEADER.sub(rf"\g<name>{HIDDEN}", text))


def redact_all(tree: Any) -> Any:
    """A tree of mappings and lists with all of its texts redacted."""
    if isinstance(tree, str):
        return redact(tree)
    if isinstance(tree, Mapping):
        return {redact_all(key): redact_all(value) for key, value in tree.items()}
    return type(tree)(map(redact_all, tree)) if isinstance(tree, list | tuple) else tree


def restored(text: str, *, is_tracking: bool) -> str | None:
    """A redacted URI as it can be used, where the environment has what was hidden; None where it has not.

    Args:
        is_tracking: whether it is MLflow's, which has variables of its own.
    """
    whole = os.environ.get("MLFLOW_TRACKING_URI", "")
    if is_tracking and HIDDEN not in whole and redact(whole) == text:
        return whole
    if not any(all(map(os.environ.get, names)) for names in _variables(text, is_tracking=is_tracking)):
        return None
    without = re.sub(rf"(?<=[?&;])[^?&;]*={HIDDEN}&?", "", text.replace(f"{HIDDEN}@", "")).rstrip("?&;")
    return None if HIDDEN in without else without


def variables(text: str, *, is_tracking: bool) -> str:
    """The variables that `restored` looks for, for messages; empty where there are none for such a URI."""
    ways = [" and ".join(names) for names in _variables(text, is_tracking=is_tracking)]
    return " or ".join([*ways, *(["MLFLOW_TRACKING_URI"] if is_tracking else [])])


def _variables(text: str, *, is_tracking: bool) -> Sequence[Sequence[str]]:
    scheme = text.partition("://")[0]
    if is_tracking:
        return _TRACKING if scheme in ("http", "https") else ()
    return _VARIABLES.get(scheme, ())


def _without_user(match: re.Match[str]) -> str:
    scheme, user = match["scheme"], match["user"]
    is_name = user is not None and ":" not in user and (user in ("", "anonymous") or _NAMED.match(scheme))
    return match[0] if is_name else f"{scheme}://{HIDDEN}@"


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    end = value[len(value.rstrip(").,;]}")) :]  # of the sentence that the URI stands in
    return f"{match['name']}{HIDDEN}{end}"
