"""The proof that a run lost and repeated no sample: its ledger against the order of samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokendrop.data.read.order import NotPreparedError, SampleOrder
from tokendrop.data.read.row_reader import sample_order
from tokendrop.data.shards.format import MANIFEST, SHARDS, Committed
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.track.journal import LEDGER, LEDGER_SCHEMA
from tokendrop.track.parts import read_part, span_of
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step

# The ledger is compared so many samples at a time; the order of samples is asked for fewer, for it is quickest so.
_BLOCK, _ORDER_BLOCK = 2**20, 2**15
_MOST_PLACES = 20

Progress = Callable[[int, int], None]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps in a row that were trained at one world size."""

    from_step: int
    to_step: int
    world_size: int | None
    """None where no rank tells of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A sample that is not where it belongs."""

    step: int
    sample_id: int
    what: Literal["missing", "repeated", "wrong"]
    """It is of this step and not there, there more than once, or there and out of place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What became of each sample; samples - repeated + missing = steps x global batch."""

    run: str
    steps: int
    """Committed ones; samples of later steps will be trained again, and are not looked at."""
    samples: int
    """Those that the ledger has."""
    missing: int
    """Those that a step should have and has not."""
    repeated: int
    """Those that a step has and should not have, or not again. So a sample in a step that is not its own counts
    twice: it is missing from the one and repeated in the other."""
    world_sizes: tuple[Stretch, ...]
    faulty_steps: int
    """Steps with a fault, the last of which is `last_faulty_step`."""
    last_faulty_step: int | None
    where: tuple[Fault, ...]
    """The first places, by step."""

    @property
    def is_clean(self) -> bool:
        """Whether each sample of each committed step was trained on, once."""
        return not self.missing and not self.repeated


def audit(run: Path, *, progress: Progress = lambda step, steps: None) -> Audit:
    """Compare the ledger of a run, at work or ended, with the samples that each committed step should have.

    Reads the ledger once, in memory that does not grow with the run, and no token shards: their manifest will do.

    Args:
        progress: told the steps compared and those that there are.
    Raises:
        UserError: this is no run folder, no step is committed, or the manifest is gone.
        DamagedDataError: the run's job, all of its checkpoints or a part of its ledger are damaged.
    """
    config, data = open_run_folder(run)
    steps = committed_step(run / CHECKPOINTS)  # with a look at the files' sizes: no weights are read for a number
    if not steps:
        raise UserError(f"{run}: want a run folder with a committed checkpoint; found none")
    if not (data / MANIFEST).is_file():
        raise UserError(f"{run}: its order of samples can't be known without {MANIFEST} and {SHARDS} in {data}")
    committed = read_manifest(data).committed("train")
    comparison = _Comparison(sample_order(config.data, seed=config.seed), committed, batch=config.train.global_batch)
    size = max(1, _BLOCK // config.train.global_batch)
    for start, end, parts in _spans(run / LEDGER, steps):
        for first in range(start, end, size):
            last = min(first + size, end)
            # at the edges of a part no bound, so that none of its lines is passed over, whatever step it names
            bounds = [("step", ">", first)] * (first > start) + [("step", "<=", last)] * (last < end)
            try:
                comparison.add(first, last, [read_part(part, LEDGER_SCHEMA, bounds) for part in parts])
            except NotPreparedError:
                reached = f"not prepared as far as step {last}"
                raise UserError(f"{run}: its order of samples can't be known, {data} is {reached}") from None
            progress(last, steps)
    return Audit(
        run=str(run),
        steps=steps,
        samples=comparison.samples,
        missing=comparison.missing,
        repeated=comparison.repeated,
        world_sizes=tuple(comparison.world_sizes),
        faulty_steps=comparison.faulty_steps,
        last_faulty_step=comparison.last_faulty_step,
        where=tuple(comparison.where),
    )


def _spans(ledger: Path, steps: int) -> Iterator[tuple[int, int, list[Path]]]:
    """Stretches start < step <= end that make up all committed steps, with the parts that tell of each."""
    found: list[tuple[int, int, Path]] = []
    for path in ledger.glob("[!.]*.parquet"):
        span = span_of(path)
        if span is None:
            raise DamagedDataError(f"{path}: not a part of a ledger; want the folder as training left it")
        if span[1] <= steps:
            found.append((*span, path))
    start, end, parts = 0, 0, list[Path]()
    for first, last, path in [*sorted(found), (steps, steps, ledger)]:
        if first >= end:
            if parts:
                yield start, end, parts
            if first > end:
                yield end, first, []
            start, end, parts = first, last, []
        end = max(end, last)
        parts.append(path)


class _Comparison:
    """Counts and places of faults, and stretches of one world size, as blocks of steps come in."""

    def __init__(self, order: SampleOrder, committed: Committed, *, batch: int) -> None:
        self.order, self.committed, self.batch = order, committed, batch
        self.samples = self.missing = self.repeated = self.faulty_steps = 0
        self.last_faulty_step: int | None = None
        self.world_sizes: list[Stretch] = []
        self.where: list[Fault] = []

    def add(self, first: int, last: int, tables: Sequence[pa.Table]) -> None:
        """Take in what the ledger has of the steps first < step <= last."""
        steps, sizes, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        counts = [np.empty(0, np.int64)]
        for table in tables:
            samples = table.column("sample_ids").combine_chunks()
            steps.append(table.column("step").to_numpy())
            sizes.append(table.column("world_size").to_numpy())
            counts.append(samples.value_lengths().to_numpy())
            ids.append(samples.flatten().to_numpy())
        steps_R = np.concatenate(steps)
        self._add_world_sizes(first, last, steps_R, np.concatenate(sizes))
        self._add_samples(first, last, np.repeat(steps_R, np.concatenate(counts)), np.concatenate(ids))

    def _add_world_sizes(self, first: int, last: int, steps_R: Integers, sizes_R: Integers) -> None:
        here = (steps_R > first) & (steps_R <= last)
        sizes = np.zeros(last - first, np.int64)
        np.maximum.at(sizes, steps_R[here] - first - 1, sizes_R[here])
        edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), last - first]
        for start, end in pairwise(edges):
            size = int(sizes[start]) or None
            from_step = first + start + 1
            if self.world_sizes and self.world_sizes[-1].world_size == size:
                from_step = self.world_sizes.pop().from_step
            self.world_sizes.append(Stretch(from_step=from_step, to_step=first + end, world_size=size))

    def _add_samples(self, first: int, last: int, steps_F: Integers, ids_F: Integers) -> None:
        """Line up the samples that should be there with those that are, and count both of each."""
        steps_E = np.repeat(np.arange(first + 1, last + 1), self.batch)
        ids_E = self._expected(first * self.batch, last * self.batch)
        steps, ids = np.concatenate([steps_E, steps_F]), np.concatenate([ids_E, ids_F])
        by_place = np.lexsort((ids, steps))
        steps, ids = steps[by_place], ids[by_place]
        is_new = np.concatenate([[True], (np.diff(steps) != 0) | (np.diff(ids) != 0)])
        starts = np.flatnonzero(is_new)
        wanted = np.add.reduceat((by_place < len(ids_E)).astype(np.int64), starts)
        surplus = np.diff([*starts, len(ids)]) - 2 * wanted
        self.samples += len(ids_F)
        self.missing -= int(surplus[surplus < 0].sum())
        self.repeated += int(surplus[surplus > 0].sum())
        faulty = np.unique(steps[starts[surplus != 0]])
        if len(faulty):
            self.faulty_steps += len(faulty)
            self.last_faulty_step = max(int(faulty[-1]), self.last_faulty_step or 0)
        for place in np.flatnonzero(surplus)[: _MOST_PLACES - len(self.where)]:
            what = "missing" if surplus[place] < 0 else "repeated" if wanted[place] else "wrong"
            at = starts[place]
            self.where.append(Fault(step=int(steps[at]), sample_id=int(ids[at]), what=what))

    def _expected(self, start: int, end: int) -> Integers:
        blocks = [np.arange(place, min(place + _ORDER_BLOCK, end)) for place in range(start, end, _ORDER_BLOCK)]
        return np.concatenate([self.order.sample_ids(block, self.committed) for block in blocks])
