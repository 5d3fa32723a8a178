"""Conditions on runs, as `tokendrop runs --where` takes them: `drop.method=random_ltd`, `val_loss<3`."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import yaml

from tokendrop.errors import UserError
from tokendrop.report.listing import RunOverview, Tree

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([\w.\-]+)\s*(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_OF_OVERVIEW = {field.name for field in fields(RunOverview)}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; a run that lacks its key does not meet it."""

    key: str
    sign: str
    value: Any

    def holds(self, run: RunOverview, job: Tree) -> bool:
        """Whether a run meets it; keys of the listing count before those of the job."""
        found = asdict(run) if self.key in _OF_OVERVIEW else job
        if self.key not in found:
            return False
        one, other = (_number(value) for value in (found[self.key], self.value))
        try:
            return _OPERATORS[self.sign](one, other)
        except TypeError:  # a text against a number
            return False


def parse_condition(text: str) -> Condition:
    """
    Raises:
        UserError: it is no condition.
    """
    wrong = UserError(f"--where: want KEY=VALUE, or !=, <, <=, >, >= in place of =, got {text[:80]!r}")
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise wrong
    try:
        return Condition(found[1], found[2], yaml.safe_load(found[3]))
    except (yaml.YAMLError, ValueError):
        raise wrong from None


def check_keys(conditions: Sequence[Condition], jobs: Sequence[Tree]) -> None:
    """Raises UserError where no run has the key of a condition; without runs there is nothing to check."""
    known = sorted(_OF_OVERVIEW.union(*jobs))
    for condition in conditions:
        if jobs and condition.key not in known:
            near = get_close_matches(condition.key, known, n=1)
            raise UserError(
                f"--where: {condition.key}: no run here has this key" + (f"; did you mean {near[0]}?" if near else "")
            )


def _number(value: Any) -> Any:
    """A number where a text says one, such as 1e-3, which YAML takes for a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
