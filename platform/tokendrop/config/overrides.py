"""One tree of plain values over another, and `key=value` with a dotted key over a tree."""

import re
from typing import Any

from tokendrop.config.files import Tree, kind_of, parse, profile_mapping, shown
from tokendrop.errors import UserError

_PART = re.compile(r"([^\[\]]+)((?:\[[0-9]{1,9}\])*)")  # of a dotted key: a name, and places in the lists that it holds
_PROFILE = ("scaling", "profile")
Path = tuple[str | int, ...]
"""Names of branches, and places in lists."""


def merge(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`, branch by branch; a branch of another kind replaces, not merges."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and _same_kind(below, value):
            value = merge(below, value)
        merged[key] = value
    return merged


def _same_kind(below: Tree, over: Tree) -> bool:
    return all(tag not in over or over[tag] == below.get(tag) for tag in ("kind", "method"))


def with_override(tree: Tree, text: str) -> Tree:
    """A job's tree with one `key=value`, such as `data.sources[0].weight=2`; what it does not name stays.

    A device profile that is named, not written out, is read where the key is one of its own.

    Raises:
        UserError: it is no override, or its key leads through what holds no such part; the message quotes it.
    """
    where = f"override {shown(repr(text))}"
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{where}: want key=value, such as train.length='100 steps'")
    path = _path(key, where)
    if path[:-1][:2] == _PROFILE:
        tree = _with_profile(tree)
    return _replaced(tree, path, parse(value, where), where)


def _with_profile(tree: Tree) -> Tree:
    """The tree with the device profile that it names written out."""
    scaling = tree.get("scaling")
    if not isinstance(scaling, dict) or not isinstance(scaling.get("profile"), str):
        return tree
    return tree | {"scaling": scaling | {"profile": profile_mapping(scaling["profile"], ".".join(_PROFILE))}}


def _path(key: str, where: str) -> Path:
    path: list[str | int] = []
    for part in key.split("."):
        if not ("[" in part or "]" in part):
            path.append(part)
        elif match := _PART.fullmatch(part):
            path += [match[1], *map(int, re.findall("[0-9]+", match[2]))]
        else:
            raise UserError(f"{where}: want an entry of a list as name[number], counted from 0")
    return tuple(path)


def _replaced(below: Any, path: Path, value: Any, where: str, holder: str = "job") -> Any:
    """A copy of a branch with the value at a path in it; copies, because aliases in YAML may share branches."""
    if not path:
        return merge({"": below}, {"": value})[""]
    part, rest = path[0], path[1:]
    if isinstance(part, int):
        if not isinstance(below, list) or part >= len(below):
            found = f"a list of {len(below)}, counted from 0" if isinstance(below, list) else kind_of(below)
            raise UserError(f"{where}: '{holder}' holds {found}, it has no [{part}]")
        changed = _replaced(below[part], rest, value, where, f"{holder}[{part}]")
        return [*below[:part], changed, *below[part + 1 :]]
    below = {} if below is None else below
    if not isinstance(below, dict):
        raise UserError(f"{where}: '{holder}' holds {kind_of(below)}, it has no keys below it")
    part = next((key for key in below if str(key) == part), part)  # a key may be a number
    return below | {part: _replaced(below.get(part), rest, value, where, part)}
