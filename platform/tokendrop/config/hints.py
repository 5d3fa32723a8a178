"""What was meant by a key or a value that is none."""

import dataclasses
import types
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

from tokendrop.schedule.duration import Duration

_ALIKE = 0.8  # of a key in another branch; one of the same branch may be less like it


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key of a field in a job file: its name, without the `_` that keeps it from being a keyword of Python."""
    return field.name.rstrip("_")


def joined(path: str, key: object) -> str:
    """A key behind the dotted path of its branch, which is empty at the root."""
    return f"{path}.{key}" if path else str(key)


def key_hint(key: object, branch: Any, path: str) -> str:
    """The full key that was meant by one which a branch does not have: of the branch, or of one below it.

    Args:
        branch: the dataclass.
        path: its dotted path; empty at the root.
    """
    names = [key_of(field) for field in dataclasses.fields(branch)]
    below: dict[str, str] = {}  # the first key of each name
    for full in _keys_below(branch, path):
        below.setdefault(full.rpartition(".")[2], full)
    if str(key) in below:
        return f"; did you mean '{below[str(key)]}'?"
    if near := get_close_matches(str(key), names, n=1):
        return f"; did you mean '{joined(path, near[0])}'?"
    if near := get_close_matches(str(key), below, n=1, cutoff=_ALIKE):
        return f"; did you mean '{below[near[0]]}'?"
    return f"; want one of {', '.join(names)}"


def value_hint(value: object, choices: Iterable[object]) -> str:
    """The value that was found, and the choice that was meant, if one is like it."""
    near = get_close_matches(str(value), list(map(str, choices)), n=1)
    return f", got {value!r}" + (f"; did you mean '{near[0]}'?" if near else "")


def _keys_below(branch: Any, path: str) -> Iterator[str]:
    """Full keys of the branches of a dataclass; none of lists and mappings, whose keys have numbers or other names."""
    hints = get_type_hints(branch)
    for field in dataclasses.fields(branch):
        target, key = hints[field.name], joined(path, key_of(field))
        for one in get_args(target) if get_origin(target) in (Union, types.UnionType) else (target,):
            if dataclasses.is_dataclass(one) and one is not Duration:
                yield from (joined(key, key_of(inner)) for inner in dataclasses.fields(one))
                yield from _keys_below(one, key)
