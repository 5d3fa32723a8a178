"""Some steps of a run as torch's profiler sees them, and where their time went."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tokendrop.config.traced_steps import TracedSteps
from tokendrop.train.engines.base import Engine, no_label
from tokendrop.train.trace_summary import PROFILE, write_summary

PHASES = ("data", "forward", "backward", "optimizer")
_MOVES = ("_Gather", "_Combine", "_GatherBackward", "_CombineBackward")
_COMMUNICATION = ("gloo:", "nccl")  # spans of the process group, kernels on the device

Trace = Callable[[int], AbstractContextManager[Any]]
"""Around the work of one step, numbered from 1."""


def untraced(step: int) -> nullcontext[None]:
    """The `Trace` that traces nothing."""
    return nullcontext()


@contextmanager
def tracing(steps: TracedSteps | None, run: Path, engine: Engine) -> Iterator[Trace]:
    """Trace these steps of one worker, if any, into a run's folder; other steps cost nothing.

    It leaves a trace for Perfetto or chrome://tracing, and a summary. Where the workers change within the steps,
    the summary is that of the last workers that trained some of them.
    """
    if steps is None:
        yield untraced
        return
    tracer = _Tracer(steps, run, engine)
    with ThreadPoolExecutor(1, thread_name_prefix="trace") as writer:
        try:
            yield partial(tracer.around, writer)
        finally:
            tracer.stop(writer)
    if tracer.written is not None:
        tracer.written.result()


class _Tracer:
    def __init__(self, steps: TracedSteps, run: Path, engine: Engine) -> None:
        self.steps, self.run, self.engine = steps, run, engine
        self.on_gpu = engine.device.type == "cuda"
        self.profiler: profile | None = None
        self.traced: list[int] = []
        self.seconds, self.began = 0.0, 0.0
        self.written: Future[None] | None = None

    @contextmanager
    def around(self, writer: Executor, step: int) -> Iterator[None]:
        if not self.steps.first <= step <= self.steps.last:
            yield
            return
        if self.profiler is None:
            self.start()
        began, self.engine.label = time.perf_counter(), record_function  # not of a validation between two steps
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.engine.label = no_label
        self.traced.append(step)
        if step == self.steps.last:
            self.stop(writer)

    def start(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])])
        self.profiler.start()
        if self.on_gpu:
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def stop(self, writer: Executor) -> None:
        """Have the trace written meanwhile: it takes longer than other workers wait for this one's next step."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        if self.on_gpu:  # the host is ahead of the device
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
        profiler.stop()
        if self.traced:
            self.written = writer.submit(self._write, profiler)

    def _write(self, profiler: profile) -> None:
        folder = self.run / PROFILE
        folder.mkdir(exist_ok=True)
        first, last = self.traced[0], self.traced[-1]
        profiler.export_chrome_trace(str(folder / f"steps_{first}_to_{last}.json.gz"))
        count = len(self.traced)
        summary = {
            "first_step": first,
            "last_step": last,
            "world_size": self.engine.world_size,
            "step_s": self.seconds / count,
            **where_time_went(profiler.events() or [], self.seconds, steps=count, on_gpu=self.on_gpu),
        }
        write_summary(self.run, summary)


def where_time_went(events: Sequence[Any], seconds: float, *, steps: int, on_gpu: bool) -> dict[str, Any]:
    """Seconds a step by phase; on a GPU those of the device, but for the data.

    Args:
        events: of `torch.profiler.profile.events`.
        seconds: that all traced steps took.
    Returns:
        `phases_s` add up to the time of a step, what is left being `other`; `within_s` is a part of them, and
        communication may overlap with other work.
    """

    def total_s(is_one: Callable[[str], bool], device: DeviceType) -> float:
        found = [event for event in events if event.device_type == device and is_one(event.name)]
        return sum(event.time_range.elapsed_us() for event in found) / 1e6

    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    phases = {phase: total_s(phase.__eq__, DeviceType.CPU if phase == "data" else device) for phase in PHASES}
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    moves = [event for event in events if event.name in _MOVES]
    moves_us = sum(event.device_time_total if on_gpu else event.cpu_time_total for event in moves)
    within = {
        "gather and combine": moves_us / 1e6,
        "communication": total_s(lambda name: name.startswith(_COMMUNICATION), device),
    }
    return {
        "phases_s": {phase: total / steps for phase, total in phases.items()},
        "within_s": {part: total / steps for part, total in within.items()},
    }
