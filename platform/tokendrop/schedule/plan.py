"""The whole run, known before its first step."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.kept_length import KeptLengthSchedule
from tokendrop.schedule.learning_rate import LearningRate
from tokendrop.schedule.traffic import Sharing

Clock = Literal["step", "layer_token"]
_MOST_SEGMENTS = 50_000  # some seconds to lay out


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps `start <= step < stop`, in which neither the kept length nor the workers change."""

    start: int
    stop: int
    kept_length: int
    workers: int
    accumulation: int
    layer_tokens_before: int
    layer_tokens_per_step: int
    flops_before: int
    flops_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """For every step: kept length, workers, layer tokens and FLOPs consumed, learning rate."""

    segments: tuple[Segment, ...]
    shape: ModelShape
    dropped_layers: tuple[int, ...]
    batch: BatchSplit
    """At the fixed number of workers; a segment's own is in its `workers`."""
    lr_clock: Clock
    learning_rate: LearningRate
    sharing: Sharing = "ddp"
    """How workers share the model out, which decides what they send each other."""

    @property
    def steps(self) -> int:
        return self.segments[-1].stop

    @property
    def resizes(self) -> tuple[tuple[int, int, int], ...]:
        """Where the workers change: (first step of the new number, workers before, workers from there on)."""
        return tuple(
            (two.start, one.workers, two.workers) for one, two in pairwise(self.segments) if one.workers != two.workers
        )

    def next_resize(self, step: int) -> int:
        """The first step after `step` from which on the workers are others; the end of the run where there is none."""
        return next((start for start, _, _ in self.resizes if start > step), self.steps)

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * self.shape.sequence_length

    @property
    def layer_tokens_full(self) -> int:
        """Layer tokens of the same run at full length."""
        return self.steps * self.batch.global_batch * self.shape.layers * self.shape.sequence_length

    @property
    def flops_full(self) -> int:
        """FLOPs of the same run at full length."""
        per_sequence = self.shape.flops(kept=self.shape.sequence_length, dropped_layers=0)
        return self.steps * self.batch.global_batch * per_sequence

    def at(self, step: int) -> Segment:
        """The segment that holds `step`."""
        if not 0 <= step < self.steps:
            raise ValueError(f"want a step in 0..{self.steps - 1}, got {step}")
        return self.segments[bisect_right(self.segments, step, key=lambda segment: segment.start) - 1]

    def layer_tokens(self, step: int) -> int:
        """Layer tokens consumed before `step`, over all ranks."""
        if step == 0:
            return 0
        segment = self.at(step - 1)
        return segment.layer_tokens_before + (step - segment.start) * segment.layer_tokens_per_step

    def flops(self, step: int) -> int:
        """FLOPs spent before `step`, over all ranks."""
        if step == 0:
            return 0
        segment = self.at(step - 1)
        return segment.flops_before + (step - segment.start) * segment.flops_per_step

    def layer_token_saving(self) -> float:
        """Share of layer tokens saved over all layers."""
        return 1 - self.layer_tokens(self.steps) / self.layer_tokens_full

    def dropped_layer_token_saving(self) -> float:
        """Share of layer tokens saved over the dropped layers alone; 0 when there are none."""
        dropped = len(self.dropped_layers)
        return self.layer_token_saving() * self.shape.layers / dropped if dropped else 0.0

    def flops_saving(self) -> float:
        """Share of FLOPs saved, head and attention counted."""
        return 1 - self.flops(self.steps) / self.flops_full

    def lr(self, step: int) -> float:
        """Learning rate of `step`, by the steps or layer tokens consumed before and after it."""
        clock = (step, step + 1) if self.lr_clock == "step" else (self.layer_tokens(step), self.layer_tokens(step + 1))
        return self.learning_rate.of_step(*clock)

    def warmup_steps(self) -> int:
        """Steps until the warm-up is over: T_warmup, or T_LTwarmup of appendix C."""
        if self.lr_clock == "step":
            return self.learning_rate.warmup
        return bisect_left(range(self.steps + 1), self.learning_rate.warmup, key=self.layer_tokens)


def check_countable(schedule: KeptLengthSchedule, steps: int) -> None:
    """Raises ValueError where a run would have more kept lengths than can be laid out in some seconds."""
    start: int | None = 0
    for _ in range(_MOST_SEGMENTS):
        if (start := schedule.next_change(start)) is None or start >= steps:
            return
    raise ValueError(f"want at most {_MOST_SEGMENTS:,} kept lengths in a run; want larger jumps, or fewer")


def build_plan(
    *,
    steps: int,
    schedule: KeptLengthSchedule,
    shape: ModelShape,
    dropped_layers: tuple[int, ...],
    batch: BatchSplit,
    lr_clock: Clock,
    warmup_steps: int,
    peak_lr: float,
    final_lr: float,
    decay: Literal["linear", "cosine", "constant"],
    sharing: Sharing = "ddp",
) -> RunPlan:
    """Lay out a run.

    Args:
        steps: optimizer steps of the run.
        warmup_steps: warm-up of the step schedule; on the layer-token clock it becomes the layer tokens that
            as many steps consume at full length (appendix C).
    Raises:
        ValueError: the pieces do not fit together.
    """
    segments = tuple(_segments(steps, schedule, shape, len(dropped_layers), batch))
    if lr_clock == "step":
        total, warmup = steps, warmup_steps
    else:
        total = segments[-1].layer_tokens_before + (
            (segments[-1].stop - segments[-1].start) * segments[-1].layer_tokens_per_step
        )
        warmup = warmup_steps * batch.global_batch * shape.layers * shape.sequence_length
    rate = LearningRate(peak=peak_lr, final=final_lr, warmup=warmup, decay_length=total - warmup, decay=decay)
    return RunPlan(
        segments=segments,
        shape=shape,
        dropped_layers=dropped_layers,
        batch=batch,
        lr_clock=lr_clock,
        learning_rate=rate,
        sharing=sharing,
    )


def _segments(
    steps: int, schedule: KeptLengthSchedule, shape: ModelShape, dropped_layers: int, batch: BatchSplit
) -> Iterator[Segment]:
    if steps < 1:
        raise ValueError(f"want at least 1 step, got {steps}")
    start = layer_tokens = flops = 0
    while start < steps:
        stop = min(schedule.next_change(start) or steps, steps)
        kept = schedule.kept_length(start)
        segment = Segment(
            start=start,
            stop=stop,
            kept_length=kept,
            workers=batch.world_size,
            accumulation=batch.accumulation,
            layer_tokens_before=layer_tokens,
            layer_tokens_per_step=batch.global_batch * shape.layer_tokens(kept=kept, dropped_layers=dropped_layers),
            flops_before=flops,
            flops_per_step=batch.global_batch * shape.flops(kept=kept, dropped_layers=dropped_layers),
        )
        yield segment
        layer_tokens += (stop - start) * segment.layer_tokens_per_step
        flops += (stop - start) * segment.flops_per_step
        start = stop
