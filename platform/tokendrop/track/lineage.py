"""What a run that was forked keeps of where it comes from: its parent, the step, and what was changed there."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write
from tokendrop.errors import DamagedDataError
from tokendrop.secrets import redact_all
from tokendrop.train.sealed import read_sealed_json, seal_json

LINEAGE = "lineage.json"
FORKED_FROM, FORKED_AT, FORKED_WITH = "tokendrop.forked_from", "tokendrop.forked_at", "tokendrop.forked_with"
"""Tags in MLflow: the name of the parent's folder, the step, and the overrides of its job."""
_LONGEST_TAG = 4000  # characters; MLflow takes some more


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A fork: a run that begins with a checkpoint of another run, and with the record that led to it."""

    parent: str
    """The folder of the other run."""
    step: int
    """Of the checkpoint; steps up to it are the parent's."""
    overrides: tuple[str, ...]
    """What was given to change the parent's job, as it was typed."""
    changed: Mapping[str, tuple[str, str]]
    """Every key that has another value than in the parent's job: the value there, and here."""

    @property
    def name(self) -> str:
        """That of the parent's folder."""
        return Path(self.parent).name

    @property
    def tags(self) -> dict[str, str]:
        """As MLflow has it."""
        tags = {FORKED_FROM: self.name, FORKED_AT: str(self.step), FORKED_WITH: " ".join(self.overrides)}
        return {key: value[:_LONGEST_TAG] for key, value in tags.items() if value}


def write_lineage(run: Path, lineage: Lineage) -> None:
    """Write down where a run comes from, without secrets."""
    atomic_write(run / LINEAGE, seal_json(redact_all(asdict(lineage))).encode())


def read_lineage(run: Path) -> Lineage | None:
    """Where a run comes from; None for one that is no fork.

    Raises:
        DamagedDataError: that was cut or changed since.
    """
    path = run / LINEAGE
    if not path.is_file():
        return None
    tree: Any = read_sealed_json(path)
    try:
        return Lineage(
            parent=str(tree["parent"]),
            step=int(tree["step"]),
            overrides=tuple(map(str, tree["overrides"])),
            changed={key: (str(was), str(now)) for key, (was, now) in tree["changed"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedDataError(f"{path}: damaged (it does not say where this run comes from)") from None
