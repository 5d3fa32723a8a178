"""The run folder's record: steps.parquet, ledger.parquet and the live metrics.jsonl."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from tokendrop.track.parts import OF_VALIDATION, read_all, span_of, write_part
from tokendrop.train.report import StepReport

STEPS, LEDGER, METRICS = "steps.parquet", "ledger.parquet", "metrics.jsonl"
_FLUSH_S, _TAIL_BYTES, _SPAN_BYTES = 0.5, 4096, 2**16
_STEP_LINE = b'{"step"'  # so begins the line of a step
_MOST_SAMPLES = 2**20  # of all ranks, in a part: what an audit looks at in one go


class Journal:
    """`Recorder` that writes the run folder.

    steps.parquet and ledger.parquet are Parquet datasets, folders to which every commit adds one part, so a crash
    can't damage what was committed. A part more is added whenever a million samples have come together since the last
    one, so parts are no larger than that, or than a step. metrics.jsonl is appended to as steps happen, for those who
    watch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        start: int,
        group: int = 1,
        timings: Sequence[tuple[str, float]] = (),
        gather: Callable[[pa.Table], Sequence[pa.Table]] = lambda own: [own],
    ) -> None:
        """
        Args:
            group: ranks that train on the same samples, the first of which writes them down.
            timings: what these workers went through before their first step, in order, each with the time at its end.
            gather: called by all ranks at once; returns on rank 0 what all of them gave, and nothing on the others.
                Without it each rank writes a ledger of its own.
        """
        self.folder, self.rank, self.world_size, self.start, self.timings = folder, rank, world_size, start, timings
        self.gather, self.group = gather, group
        self._paused: dict[str, Any] | None = None
        self._reports: list[StepReport] = []
        self._steps: list[int] = []
        self._samples: list[list[int]] = []
        self._held = 0
        """Samples of all ranks since the last part."""
        self._live: TextIO | None = None
        if rank == 0:
            self._paused = _pause_at(folder, start)
            for part in uncommitted_parts(folder, start):
                part.unlink()
            # line-wise, and a fresh line first: the attempt before may have died in the middle of one
            self._live = (folder / METRICS).open("a", encoding="utf-8")
            self._tell({"attempt_from": start, "world_size": world_size, "pid": os.getpid()})
        self._flushed = time.monotonic()

    def passed(self, name: str) -> None:
        """Add to the timings what these workers have just gone through; before their first step."""
        self.timings = [*self.timings, (name, time.time())]

    def record(self, report: StepReport, sample_ids: Sequence[int]) -> None:
        if self.rank == 0:
            self._reports.append(report)
        self._steps.append(report.step)
        self._samples.append(list(sample_ids) if self.rank % self.group == 0 else [])
        if self._paused is not None:
            self._tell(self._resize(self._paused, time.time()))
            self._paused = None
        self._tell(asdict(report))
        self._held += len(sample_ids) * self.world_size // self.group
        if self._held >= _MOST_SAMPLES:  # ranks have as many each, so all of them come here at the same step
            self._write(report.step)

    def commit(self, step: int) -> None:
        if self.rank == 0:
            self._flush()
        if step > self.start:
            self._write(step)

    def _write(self, step: int) -> None:
        """Add a part of the steps since the last one to each dataset."""
        span = {"start": self.start, "end": step, "rank": self.rank}
        if self.rank == 0:
            rows = [asdict(report) for report in self._reports]
            for row in rows:
                row["val_figures"] = None if row["val_figures"] is None else [*row["val_figures"].items()]
            write_part(self.folder / STEPS, pa.Table.from_pylist(rows, _STEPS_SCHEMA), **span)
        ledger = {
            "step": self._steps,
            "rank": [self.rank] * len(self._steps),
            "world_size": [self.world_size] * len(self._steps),
            "sample_ids": self._samples,
        }
        if ledgers := self.gather(pa.table(ledger, schema=LEDGER_SCHEMA)):
            table = pa.concat_tables(ledgers).sort_by(_BY_STEP)
            write_part(self.folder / LEDGER, table, **span, rows_of_step=len(ledgers))
        self._reports, self._steps, self._samples, self._held, self.start = [], [], [], 0, step

    def pause(self, step: int, *, checkpoint_s: float) -> None:
        self._tell({"paused_at": step, "world_size": self.world_size, "checkpoint_s": checkpoint_s})

    def _resize(self, paused: dict[str, Any], now: float) -> dict[str, Any]:
        """The line that says what a change of workers took, from the last step before it to the first one after."""
        clock, parts = paused["time"], {"checkpoint": paused["checkpoint_s"]}
        for name, end in [*self.timings, ("first step", now)]:
            parts[name], clock = end - clock, end
        pause_s = paused["checkpoint_s"] + now - paused["time"]
        sizes = {"from": paused["world_size"], "to": self.world_size}
        return {"resize_at": paused["paused_at"], **sizes, "pause_s": pause_s, "parts_s": parts}

    def _tell(self, line: dict[str, Any]) -> None:
        if self._live is None:
            return
        self._live.write("\n" * ("attempt_from" in line) + json.dumps({**line, "time": time.time()}) + "\n")
        if "step" not in line or time.monotonic() - self._flushed > _FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        assert self._live is not None
        self._live.flush()
        self._flushed = time.monotonic()


def note_loss(folder: Path, cause: str) -> None:
    """Write into the live record that a worker was lost; called by who watches the workers."""
    _note(folder, {"lost": cause})


def note_start(folder: Path, step: int) -> None:
    """Write into the live record that a driver begins to train from a step: what was paused before is no resize."""
    _note(folder, {"driver_from": step})


def _note(folder: Path, line: dict[str, Any]) -> None:
    with (folder / METRICS).open("a", encoding="utf-8") as live:
        live.write("\n" + json.dumps({**line, "time": time.time()}) + "\n")


def uncommitted_parts(folder: Path, step: int) -> Iterator[Path]:
    """Parts of steps from `step` on: written before a checkpoint that was never committed, or that is damaged."""
    for dataset in (STEPS, LEDGER):
        for part in (folder / dataset).glob("*"):
            span = span_of(part)
            if part.name.startswith(".") or (span and span[1] > step):  # or what a killed rank has half written
                yield part


def copy_record(run: Path, to: Path, step: int) -> None:
    """Copy what a run has recorded of its committed steps up to `step`, of a checkpoint, into a new run's folder."""
    for dataset in (STEPS, LEDGER):
        (to / dataset).mkdir()
        for part in (run / dataset).glob("[!.]*.parquet"):
            if (span := span_of(part)) and span[1] <= step:
                shutil.copyfile(part, to / dataset / part.name)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """One row for each recorded step, in order, as in `StepReport`; raises as `read_part` does."""
    return steps_table(folder).to_pylist(maps_as_pydicts="strict")


def steps_table(folder: Path) -> pa.Table:
    """The same rows as columns, for readers of many runs; raises as `read_part` does."""
    return read_all(folder / STEPS, _STEPS_SCHEMA).sort_by("step")


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """One row for each recorded step and rank: step, rank, world_size, sample_ids; raises as `read_part` does."""
    ledger = read_all(folder / LEDGER, LEDGER_SCHEMA)
    return ledger.sort_by(_BY_STEP).to_pylist()


class MetricsTail:
    """Reads metrics.jsonl as it grows, from a byte offset on."""

    def __init__(self, folder: Path, offset: int = 0) -> None:
        self.path, self.offset = folder / METRICS, offset

    def skip(self) -> None:
        """Leave out what is there already."""
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def read(self, limit: int = 2**22) -> list[dict[str, Any]]:
        """The complete lines that are new, about `limit` bytes at most (-1: all); `offset` moves behind them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(limit)
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [parsed for line in complete.split(b"\n") if (parsed := _parse(line)) is not None]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of something else than a step, of which there may be very many."""
    try:
        lines = (folder / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    whole = lines[:-1]  # the last one ends without a line feed, or is empty
    return [parsed for line in whole if not line.startswith(_STEP_LINE) and (parsed := _parse(line)) is not None]


def recorded_span(folder: Path) -> tuple[float, float] | None:
    """The times of the first and of the last line of metrics.jsonl, in seconds since 1970; None where it has none."""
    path = folder / METRICS
    size = path.stat().st_size if path.exists() else 0
    ends = (MetricsTail(folder).read(_SPAN_BYTES), MetricsTail(folder, max(0, size - _SPAN_BYTES)).read())
    times = [line["time"] for lines in ends for line in lines if isinstance(line.get("time"), int | float)]
    return (times[0], max(times)) if times else None


def _pause_at(folder: Path, step: int) -> dict[str, Any] | None:
    """The line of the pause at `step`, where it is the last that was written."""
    path = folder / METRICS
    tail = MetricsTail(folder, max(0, path.stat().st_size - _TAIL_BYTES) if path.exists() else 0).read()
    return tail[-1] if tail and tail[-1].get("paused_at") == step else None


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's object; None for an empty line, the rest of one whose writer died, or one that is damaged."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = [kind for kind in _LINES if isinstance(parsed, dict) and kind in parsed]
    is_whole = len(kinds) == 1 and all(_fits(key, parsed.get(key)) for key in (kinds[0], *_LINES[kinds[0]]))
    return parsed if is_whole else None


def _fits(key: str, value: Any) -> bool:
    if key in OF_VALIDATION and value is None:
        return True
    if key in ("parts_s", "val_figures"):
        return isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values())
    if key == "lost":
        return isinstance(value, str)
    return isinstance(value, int | float)


# what a line of metrics.jsonl has, beside the key that says of which kind it is
_LINES: dict[str, tuple[str, ...]] = {
    "step": tuple(field.name for field in fields(StepReport)),
    "attempt_from": ("world_size",),
    "paused_at": ("world_size", "checkpoint_s", "time"),
    "resize_at": ("from", "to", "pause_s", "parts_s"),
    "lost": (),
    "driver_from": (),
}
_STEPS_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("step", "kept_length", "tokens", "layer_tokens", "world_size")]
    + [(name, pa.float64()) for name in ("loss", "val_loss", "grad_norm", "lr", "flops", "data_time_s", "step_time_s")]
    + [("val_figures", pa.map_(pa.string(), pa.float64()))]
)
_BY_STEP = [("step", "ascending"), ("rank", "ascending")]
LEDGER_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("world_size", pa.int32()),
        ("sample_ids", pa.list_(pa.int64())),
    ]
)
