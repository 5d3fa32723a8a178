"""YAML files, of jobs and of device profiles, into mappings; errors that name the file."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tokendrop.errors import UserError

Tree = dict[str, Any]
_PROFILES = files("tokendrop") / "profiles"


def read_mapping(path: Path, what: str, *, keys: str) -> Tree:
    """The mapping that a YAML or JSON file holds.

    Args:
        what: the file's kind, as messages call it.
        keys: examples of its keys, for messages.
    Raises:
        UserError: it can't be read, or is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: a {what} must be UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: can't read this {what} ({reason})") from None
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: want a mapping of keys such as {keys}, got {kind_of(tree)}")
    return tree


def parse(text: str, where: str) -> Any:
    """YAML, and so JSON.

    Raises:
        UserError: it is not valid; the message begins with `where`.
    """
    try:
        return yaml.safe_load(text)
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


def kind_of(value: Any) -> str:
    """A value as messages call it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
