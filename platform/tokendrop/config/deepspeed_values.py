"""A DeepSpeed config as it is read: each key once, by its dotted path, and notes on what is left."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokendrop.config.files import Tree, kind_of, read_text, shown
from tokendrop.errors import UserError

AUTO = "auto"  # which Hugging Face's Trainer fills in
_MOST = 10**15
_LEFT_OUT = "no counterpart; left out"
_BY_OTHERS = "'auto', which counts as not given"


class DeepSpeedConfig:
    """Its values; what is asked for counts as used, and the rest is noted."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.notes: list[tuple[str, str]] = []
        """A dotted key, and what became of it."""
        self._used: set[str] = set()

    def note(self, key: str, sentence: str) -> None:
        """Tell of a key."""
        self.notes.append((key, sentence))

    def value(self, key: str) -> Any:
        """The value at a dotted path; None where there is none, or where it is left to others.

        Raises:
            UserError: what the path leads through is no branch.
        """
        self._used.add(key)
        below: Any = self.tree
        parts = key.split(".")
        for number, part in enumerate(parts):
            if not isinstance(below, dict):
                raise UserError(f"{'.'.join(parts[:number])}: want a mapping of keys, got {kind_of(below)}")
            below = below.get(part)
            if below is None:
                return None
        if below == AUTO:
            if (key, _BY_OTHERS) not in self.notes:
                self.note(key, _BY_OTHERS)
            return None
        return below

    def branch(self, key: str) -> Tree | None:
        """A mapping, of which keys are asked for one by one; UserError where it is none."""
        found = self.value(key)
        self._used.discard(key)
        if found is not None and not isinstance(found, dict):
            raise UserError(f"{key}: want a mapping of keys, got {kind_of(found)}")
        return found

    def whole(self, key: str, *, least: int = 1) -> int | None:
        """A whole number.

        Raises:
            UserError: it is none, or less than `least`.
        """
        found = self.value(key)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not least <= found <= _MOST or found != int(found):
            raise UserError(f"{key}: want a whole number of at least {least}, got {_said(found)}")
        return int(found)

    def number(self, key: str) -> float | None:
        """A number of at least 0; UserError where it is none."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= _MOST:
            raise UserError(f"{key}: want a number of at least 0, got {_said(found)}")
        return float(found)

    def flag(self, key: str) -> bool | None:
        """True or false; UserError where it is neither."""
        found = self.value(key)
        if found is not None and not isinstance(found, bool):
            raise UserError(f"{key}: want true or false, got {_said(found)}")
        return found

    def text(self, key: str) -> str | None:
        """A text; UserError where it is none."""
        found = self.value(key)
        if found is not None and not isinstance(found, str):
            raise UserError(f"{key}: want text, got {_said(found)}")
        return found

    def note_the_rest(self) -> None:
        """Note each key that nobody has asked for, by the branch that holds nothing else."""
        for key in self._left(self.tree, ""):
            self.note(key, _LEFT_OUT)

    def _left(self, tree: Tree, prefix: str) -> Iterator[str]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in self._used:
                continue
            if isinstance(value, dict) and any(used.startswith(f"{key}.") for used in self._used):
                yield from self._left(value, f"{key}.")
            else:
                yield shown(key)


def read_deepspeed(path: Path) -> DeepSpeedConfig:
    """Read a DeepSpeed config.

    Raises:
        UserError: it can't be read, or is no JSON object.
    """
    try:
        tree = json.loads(read_text(path, "DeepSpeed config"), parse_constant=_no_number, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: want JSON, as DeepSpeed reads it; {where}: {error.msg}") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: want JSON, as DeepSpeed reads it ({shown(str(error))})") from None
    if not isinstance(tree, dict):
        raise UserError(f'{path}: want a JSON object with keys such as "train_batch_size", got {kind_of(tree)}')
    return DeepSpeedConfig(tree)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple[str, Any]]) -> Tree:
    tree: Tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return tree


def _said(value: Any) -> str:
    return shown(json.dumps(value))
