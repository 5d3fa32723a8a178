"""The studies of the paper: each a claim of a table or a figure, with the sweeps that test it at two scales."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokendrop.config.files import read_mapping, shown
from tokendrop.config.load import build
from tokendrop.errors import UserError
from tokendrop.study.axes import Grid
from tokendrop.study.sweep import SweepConfig, load_sweep

Scale = Literal["small", "full"]
SCALES: tuple[Scale, ...] = ("small", "full")
_LENGTH = "train.length"
_SMOKE: Mapping[str, object] = {
    _LENGTH: "50 steps",  # of which 2%, by which one study decides, are a step
    "evaluate.sequences": 16,
    "train.warmup": "10%",  # some have more steps of it
    "train.cooldown": "20%",
}
_SMOKE_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study file."""

    paper: str
    """Tables, figures and sections that make the claim."""
    claim: str
    """What the paper says, as an ordering or as no worse than a margin."""
    printed: str
    """The paper's values."""
    full: str | None = None
    """The sweep with the paper's settings, from the folder of the study file on; it has a `claim`."""
    small: str | None = None
    """The sweep that tests the same on two cores."""
    note: str = ""
    """What a scale can't say, and which one would."""

    def __post_init__(self) -> None:
        if self.full is None and self.small is None:
            raise ValueError("full, small: want a sweep file for one of them")
        if (self.full is None or self.small is None) and not self.note:
            raise ValueError("note: a study with one scale says why the other is not there")

    def file_at(self, scale: Scale) -> str | None:
        """The sweep file of a scale."""
        return self.small if scale == "small" else self.full


def load_study(name: str, folder: Path) -> tuple[Study, Path]:
    """A study by its name, and its file.

    Raises:
        UserError: there is none of this name, or its file is wrong.
    """
    known = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name not in known:
        where = f"{shown(folder)} has {', '.join(known) or 'none'}"
        raise UserError(f"reproduce: no study {shown(repr(name))}; {where}; --studies names another folder")
    path = known[name]
    try:
        return build(Study, read_mapping(path, "study file", keys="'paper:' and 'claim:'"), ""), path
    except UserError as error:
        raise UserError(f"{shown(path)}: {error}") from None


def load_studies(folder: Path) -> dict[str, Study]:
    """All studies of a folder by name.

    Raises:
        UserError: there is no such folder, none in it, or one of them is wrong.
    """
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if not names:
        raise UserError(f"reproduce: {shown(folder)} has no study files; --studies names another folder")
    return {name: load_study(name, folder)[0] for name in names}


def sweep_of(study: Study, path: Path, scale: Scale, *, smoke: bool = False) -> tuple[SweepConfig, Path]:
    """The sweep that tests a study at a scale, and its file.

    Args:
        path: of the study file.
        smoke: whether a few steps of two seeds are enough, to see that it works.
    Raises:
        UserError: the study has none at this scale, or its file is wrong.
    """
    file = study.file_at(scale)
    if file is None:
        raise UserError(f"--scale {scale}: {shown(path)} has no such sweep: {study.note}")
    found = load_sweep(path.parent / file)
    if found.claim is None:
        raise UserError(f"{shown(path.parent / file)}: claim: a study wants one, with 'arm', 'against' and 'margin'")
    return (_shortened(found) if smoke else found), path.parent / file


def _shortened(sweep: SweepConfig) -> SweepConfig:
    """The same sweep with a few steps in each of its trials."""
    axes = {
        key: Grid(values=(_SMOKE[key],), when=axis.when) if key in _SMOKE else axis for key, axis in sweep.axes.items()
    }
    common = {**sweep.set, **{key: value for key, value in _SMOKE.items() if key not in axes or axes[key].when}}
    budget = sweep.budget and replace(sweep.budget, amounts=())
    return replace(sweep, name=f"{sweep.name}-smoke", set=common, axes=axes, budget=budget, seeds=_SMOKE_SEEDS)
