"""Prometheus by way of Ray, whose agent on each node exports what processes there set.

All metrics are gauges, those too that only rise. Ray's agent forgets a gauge that nobody has set for two of its report
intervals (of ten seconds), so what ends is no longer exported; a counter would stay until the node goes. For the same
reason gauges are set again and again while a run goes on.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.secrets import redact_all
from tokendrop.track.run_metrics import ABOUT, RunMetrics, Series
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_of
from tokendrop.train.report import Recorder, StepReport

EVERY_S = 2.5
"""Between two times that gauges are set: several of them within a report interval of Ray."""
MOST_RANKS = 64
"""Workers of which each exports series of its own, where a job does not say otherwise."""
EXPLAINED = ABOUT | {
    "rank/step_time_s": "Seconds of a worker's last step.",
    "rank/data_time_s": "Seconds of a worker's last step that it waited for data.",
    "prepare/documents": "Documents read by a preparation of token shards.",
    "prepare/tokens": "Tokens committed by a preparation of token shards.",
    "sweep/trials": "Trials of a sweep in a state.",
    "sweep/best": "The metric of the best arm of a sweep so far.",
}
"""What each metric is that is exported, but for figures of a task."""

Values = Mapping[Series, float]


def legal_name(metric: str) -> str:
    """The name that a metric is given to Ray by, which puts `ray_` before it.

    It is `tokendrop_` and the name in MLflow, with `_` for all but letters of ASCII and digits:
    `loss/train` is `ray_tokendrop_loss_train` in Prometheus.
    """
    return f"tokendrop_{re.sub(r'[^a-zA-Z0-9]', '_', metric)}"


def set_gauges(values: Values, tags: Mapping[str, str]) -> None:
    """Set gauges of this process; nothing where it is on no Ray.

    Args:
        tags: of all of them; `run` and `sweep`, empty where there is none, for what is of a run.
    """
    if not ray.is_initialized():
        return
    for (metric, more), value in values.items():
        every = {**tags, **dict(more)}
        _gauge(metric, tuple(sorted(every))).set(value, every)


@cache
def _gauge(metric: str, keys: tuple[str, ...]) -> Gauge:
    return Gauge(legal_name(metric), EXPLAINED.get(metric, "Of the last validation."), keys)


class RunExport:
    """Exports a run from the process that follows its live record."""

    def __init__(self, run: Path, config: ExperimentConfig) -> None:
        self.run, self.metrics = run, RunMetrics(config)
        self.tags = tags_of(run, config.track.sweep)
        self._next = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        self.metrics.take(line)

    def export(self, *, now: bool = False) -> None:
        """Set the gauges where they are due, or where they are wanted now."""
        if time.monotonic() < self._next and not now:
            return
        self._next = time.monotonic() + EVERY_S
        seen = time.time()
        set_gauges({**self.metrics.values(seen), **self._of_folder(seen)}, self.tags)

    def _of_folder(self, now: float) -> dict[Series, float]:
        found: dict[str, float] = {}
        with suppress(OSError):
            disk = shutil.disk_usage(self.run)
            found |= {"disk/free_bytes": disk.free, "disk/size_bytes": disk.total}
        with suppress(OSError):  # the checkpoint may be removed meanwhile
            if saved := committed(self.run / CHECKPOINTS):
                age_s = max(0.0, now - saved[-1].stat().st_mtime)
                found |= {"checkpoint/step": step_of(saved[-1]), "checkpoint/age_s": age_s}
        return {(name, ()): float(value) for name, value in found.items()}


def tags_of(run: Path | None, sweep: str) -> dict[str, str]:
    """The tags of all that is of a run, or of a sweep as a whole."""
    return redact_all({"run": run.name if run else "", "sweep": sweep})


@contextmanager
def exporting(values: Callable[[], Values], tags: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, a thread sets gauges again and again; what fails there hurts nobody."""
    ended = threading.Event()

    def repeat() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(EVERY_S)
            with suppress(Exception):
                set_gauges(values(), tags)

    thread = threading.Thread(target=repeat, daemon=True, name="metrics")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(EVERY_S)


class RankTimes:
    """A `Recorder` that keeps the times of its worker's last step on their way to another."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._last: StepReport | None = None

    def record(self, report: StepReport, sample_ids: Sequence[int]) -> None:
        self._last = report
        self.recorder.record(report, sample_ids)

    def commit(self, step: int) -> None:
        self.recorder.commit(step)

    def pause(self, step: int, *, checkpoint_s: float) -> None:
        self.recorder.pause(step, checkpoint_s=checkpoint_s)

    def values(self) -> Values:
        """Of the last step; nothing before it."""
        last = self._last
        if last is None:
            return {}
        return {("rank/step_time_s", ()): last.step_time_s, ("rank/data_time_s", ()): last.data_time_s}


@contextmanager
def exporting_rank(
    recorder: Recorder, tags: Mapping[str, str], *, rank: int, world_size: int, wanted: bool | None
) -> Iterator[Recorder]:
    """The recorder to train with in the block; where each worker is to be seen, its times are exported.

    Args:
        wanted: None where that is so up to `MOST_RANKS` workers.
    """
    is_seen = world_size <= MOST_RANKS if wanted is None else wanted
    if not (is_seen and ray.is_initialized()):
        yield recorder
        return
    times = RankTimes(recorder)
    with exporting(times.values, {**tags, "rank": str(rank)}):
        yield times
