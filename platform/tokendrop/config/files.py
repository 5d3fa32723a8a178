"""YAML files, of jobs and of device profiles, into mappings; errors that name the file."""

import re
import stat
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokendrop.config.yaml_tree import parse_yaml
from tokendrop.errors import UserError
from tokendrop.secrets import redact

Tree = dict[str, Any]
_PROFILES = files("tokendrop") / "profiles"
_MOST_BYTES = 2**20  # of a file; jobs have some thousand
_SHOWN = 120  # letters of what is wrong, in a message
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes that Linux takes


def read_mapping(path: Path, what: str, *, keys: str) -> Tree:
    """The mapping that a YAML or JSON file holds.

    Args:
        what: the file's kind, as messages call it.
        keys: examples of its keys, for messages.
    Raises:
        UserError: it can't be read, or is none.
    """
    tree = parse(read_text(path, what), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: want a mapping of keys such as {keys}, got {kind_of(tree)}")
    return tree


def read_text(path: Path, what: str) -> str:
    """The text of a small file that the user named; `what` is its kind, as messages call it.

    Raises:
        UserError: it can't be read.
    """
    if reason := unusable_path(str(path)):
        raise UserError(f"{shown(path)}: can't read this {what} ({reason})")
    try:
        found = path.stat()  # a pipe or a device would be waited for, perhaps for ever
        if stat.S_ISDIR(found.st_mode):
            raise UserError(f"{path}: this is a folder; {_instead_of_folder(path, what)}")
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise UserError(f"{path}: can't read this {what} (want a regular file of at most {_MOST_BYTES} bytes)")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: a {what} must be UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path}: can't read this {what} ({error.strerror or error})") from None


def _instead_of_folder(path: Path, what: str) -> str:
    """What to give, or to do, where a folder was taken for a file."""
    job = path / "job.yaml"
    if job.is_file():
        run = f"'tokendrop train --resume {path}' goes on with the run; 'tokendrop runs diff RUN RUN' compares two"
        return f"{job} is the job of this run, {run}"
    found = [str(one) for one in [*path.glob("*.yaml")] or path.glob("*/*.yaml") if str(one).isprintable()]
    return f"want a {what} such as {min(found)}" if found else f"want a {what} (.yaml)"


def parse(text: str, where: str) -> Any:
    """YAML, and so JSON.

    Raises:
        UserError: it is not valid; the message begins with `where`.
    """
    try:
        return parse_yaml(text)
    except Exception as error:  # PyYAML lets other errors than its own escape: `!!int ""` is an IndexError
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def profile_mapping(name: str, key: str) -> Tree:
    """The device profile of a shipped name or of a file.

    Raises:
        UserError: there is no such profile.
    """
    shipped = {file.name.removesuffix(".yaml"): file for file in _PROFILES.iterdir() if file.name.endswith(".yaml")}
    if name in shipped:
        return parse(shipped[name].read_text(encoding="utf-8"), name)
    if not name.endswith((".yaml", ".yml", ".json")):
        raise UserError(f"{key}: want {', '.join(sorted(shipped))} or a .yaml or .json file, got {name!r}")
    return read_mapping(Path(name), "device profile", keys="'speeds:' and 'within_node:'")


def unusable_path(text: str) -> str | None:
    """Why no file system here could have this path; None where one could."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return f"want a path of UTF-8 text, got {shown(text)}"
    if "\0" in text:
        return f"want a path without NUL, got {shown(text)}"
    if len(encoded) >= _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        return f"want a path of less than {_LONGEST_PATH} bytes, and {_LONGEST_NAME} in each name; got {shown(text)}"
    return None


def is_uri(text: str) -> bool:
    """Whether a text names a place in a store, such as s3://bucket/prefix, and none in this machine's folders."""
    return "://" in text


def is_task_file(task: str) -> bool:
    """Whether a task of lm-eval is given by its file; else it is a name, whatever lies in the folder."""
    return task.endswith((".yaml", ".yml"))


def not_a_folder(text: str) -> str | None:
    """Why this is no path of a folder or a file that every worker shares; None where it is one."""
    if is_uri(text):
        return f"want a path that all workers share, no URI, got {shown(text)}"
    return unusable_path(text)


def not_a_runs_folder(text: str) -> str | None:
    """Why no runs can be kept there, in a folder that every worker shares or in a store; None where they can."""
    if not is_uri(text):
        return unusable_path(text)
    scheme, _, rest = text.partition("://")
    if scheme not in ("s3", "gs") or not re.split("[/?#]", rest)[0]:
        return f"want a path that all workers share, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, got {shown(text)}"
    if redact(text) != text:
        return f"want credentials in the environment of the nodes, got {shown(text)}"
    return None


def shown(text: object) -> str:
    """A path or a value in a message: all of it can be printed, there is not too much of it, and no secret in it."""
    letters = "".join(letter if letter.isprintable() else "?" for letter in redact(str(text)))
    return letters if len(letters) <= _SHOWN else f"{letters[:_SHOWN]}..."


def kind_of(value: Any) -> str:
    """A value as messages call it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else shown(repr(value))
