"""The whole run, known before its first step."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape, Work
from tokendrop.schedule.device import STATE_BYTES
from tokendrop.schedule.learning_rate import Decay, LearningRate
from tokendrop.schedule.micro_batch import NO_GROWTH, MicroBatchGrowth
from tokendrop.schedule.routes import Counts, Routes, RouteSchedule, stages
from tokendrop.schedule.traffic import GroupShare, GroupSplit, Sharding, group_share_of

LrClock = Literal["step", "layer_token"]
"""What the learning rate counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps `start <= step < stop`, in which neither a kept length nor the workers change."""

    start: int
    stop: int
    kept_length: int
    """Tokens of a sequence that a dropped layer sees; their mean, rounded, where layers or sequences differ."""
    kept: tuple[int, ...]
    """Of each route, as the routes count."""
    routes: Routes
    workers: int
    most_sequences: int
    """That a worker may run at a time."""
    micro_batch: int
    """Samples that each of the planned workers runs at a time, as many of the plan's micro batches as fit."""
    accumulation: int
    recomputes: bool
    """Whether layers are computed again in the backward pass; no FLOPs are counted for that."""
    activation_bytes: int | None
    """That autograd keeps of one of the run's micro batches, before any are run as one; None where it has no limit."""
    layer_tokens_before: int
    layer_tokens_per_step: int
    flops_before: int
    flops_per_step: int

    @property
    def is_even(self) -> bool:
        """Whether `kept_length` says it all: so many tokens of every sequence in each dropped layer."""
        return self.routes.counts == "tokens" and len({*self.kept}) < 2

    @property
    def kept_by_route(self) -> dict[int, int]:
        """What stays, as the routes count, by the number of each route's first layer."""
        return {first: kept for (first, _), kept in zip(self.routes.spans, self.kept, strict=True)}

    @property
    def kept_by_layer(self) -> dict[int, int]:
        """What stays, as the routes count, by the number of each dropped layer."""
        return {
            layer: kept
            for (first, last), kept in zip(self.routes.spans, self.kept, strict=True)
            for layer in range(first, last + 1)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """For every step: kept length, workers, layer tokens and FLOPs consumed, learning rate."""

    segments: tuple[Segment, ...]
    shape: ModelShape
    routes: Routes
    batch: BatchSplit
    """At the fixed number of workers; a segment's own is in its `workers`."""
    lr_clock: LrClock
    learning_rate: LearningRate
    sharding: Sharding = "ddp"
    """How workers share the model out, which decides what they send each other."""
    group_split: GroupSplit = "layers"
    """What a group of workers shares out, where there are any."""
    state_bytes: int = STATE_BYTES
    """Of one parameter in a checkpoint, its optimizer state among them."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.segments[-1].stop

    @property
    def dropped_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that don't see everything."""
        return self.routes.layers

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
        """Tokens of one optimizer step, over all workers."""
        return self.batch.in_sequences.global_batch * self.shape.sequence_length

    @property
    def layer_tokens_full(self) -> int:
        """Layer tokens of the same run at full length."""
        return self.steps * self.tokens_per_step * self.shape.layers

    @property
    def flops_full(self) -> int:
        """FLOPs of the same run at full length."""
        per_sequence = self.shape.flops(kept=self.shape.sequence_length, dropped_layers=0)
        return self.steps * self.batch.in_sequences.global_batch * per_sequence

    def split(self, segment: Segment, workers: int) -> BatchSplit:
        """How so many workers share out the global batch in the steps of a segment."""
        return replace(self.batch, world_size=workers).merged(segment.most_sequences)

    def group_share(self, segment: Segment) -> GroupShare:
        """What each worker of a group has of a micro batch in a segment."""
        sequences, kept = self.batch.in_sequences.global_batch, segment.kept_length
        tokens, flops = segment.layer_tokens_per_step // sequences, segment.flops_per_step / sequences
        return group_share_of(
            self.group_split, self.batch.group, self.shape, layer_tokens=tokens, flops=flops, kept=kept
        )

    def at(self, step: int) -> Segment:
        """The segment that holds `step`.

        Raises:
            ValueError: the run has no such step.
        """
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


def build_plan(
    *,
    steps: int,
    routes: Sequence[RouteSchedule],
    shape: ModelShape,
    batch: BatchSplit,
    lr_clock: LrClock,
    warmup_steps: int,
    peak_lr: float,
    final_lr: float,
    decay: Decay,
    cooldown_steps: int = 0,
    sharding: Sharding = "ddp",
    counts: Counts = "tokens",
    learned: bool = False,
    lr_layer_tokens: int | None = None,
    growth: MicroBatchGrowth = NO_GROWTH,
) -> RunPlan:
    """Lay out a run.

    Args:
        steps: optimizer steps of the run.
        routes: spans of layers, apart and in order, with what stays in each, which `counts` says the unit of.
        warmup_steps: warm-up of the step schedule; on the layer-token clock it becomes the layer tokens that
            as many steps consume at full length (appendix C).
        cooldown_steps: of the decay `wsd`, by the same rule.
        learned: whether a linear map of each token to one number, before each span, chooses who stays.
        growth: of micro batches where kept lengths are short, and what they keep; none when left out.
        lr_layer_tokens: that a learning rate on the layer-token clock decays over; those of the run when left out.
    Raises:
        ValueError: the pieces do not fit together.
    """
    if steps < 1:
        raise ValueError(f"want at least 1 step, got {steps}")
    where = Routes(spans=tuple(r.span for r in routes), counts=counts, learned=learned)
    *_, last = segments = tuple(_segments(steps, routes, where, shape, batch, growth))
    total, unit = steps, 1
    if lr_clock == "layer_token":
        run = last.layer_tokens_before + (last.stop - last.start) * last.layer_tokens_per_step
        total = run if lr_layer_tokens is None else lr_layer_tokens
        unit = batch.in_sequences.global_batch * shape.layers * shape.sequence_length
    warmup, left = warmup_steps * unit, total - warmup_steps * unit
    stable = left - cooldown_steps * unit if decay == "wsd" else 0
    rate = LearningRate(peak=peak_lr, final=final_lr, warmup=warmup, decay_length=left, decay=decay, stable=stable)
    return RunPlan(
        segments=segments,
        shape=shape,
        routes=segments[0].routes,
        batch=batch,
        lr_clock=lr_clock,
        learning_rate=rate,
        sharding=sharding,
    )


def _segments(
    steps: int,
    schedules: Sequence[RouteSchedule],
    routes: Routes,
    shape: ModelShape,
    batch: BatchSplit,
    growth: MicroBatchGrowth,
) -> Iterator[Segment]:
    distinct = list(dict.fromkeys(route.kept for route in schedules))
    numbers = [distinct.index(route.kept) for route in schedules]
    layers = Counter(n for n, (first, last) in zip(numbers, routes.spans, strict=True) for _ in range(first, last + 1))
    computed, layer_tokens, flops = batch.in_sequences, 0, 0
    scoring = computed.global_batch * shape.scoring_flops(len(routes.spans)) if routes.learned else 0
    for start, stop, kept in stages(distinct, steps):
        work = [_work(routes, layers[number], stays, shape, batch) for number, stays in enumerate(kept)]
        seen, dropped = sum(map(_layer_tokens, work)), layers.total()
        mean = _rounded(seen, dropped * computed.global_batch) if dropped else shape.sequence_length
        work.append((shape.layers - dropped, computed.global_batch, shape.sequence_length))
        most = growth.most_sequences(computed, shape, work=work, kept=mean)
        segment = Segment(
            start=start,
            stop=stop,
            kept_length=mean,
            kept=tuple(kept[number] for number in numbers),
            routes=routes,
            workers=batch.world_size,
            most_sequences=most,
            micro_batch=(split := batch.merged(most)).micro_batch,
            accumulation=split.accumulation,
            recomputes=growth.activations.recomputes(shape, work, sequences=computed.micro_batch, kept=mean),
            activation_bytes=growth.activations.limited_bytes(shape, work, sequences=computed.micro_batch, kept=mean),
            layer_tokens_before=layer_tokens,
            layer_tokens_per_step=sum(map(_layer_tokens, work)),
            flops_before=flops,
            flops_per_step=scoring + shape.flops_of(work, sequences=computed.global_batch, kept=mean),
        )
        yield segment
        layer_tokens += (stop - start) * segment.layer_tokens_per_step
        flops += (stop - start) * segment.flops_per_step


def _work(routes: Routes, layers: int, kept: int, shape: ModelShape, batch: BatchSplit) -> Work:
    """What so many layers run on in one step."""
    if routes.counts == "sequences":
        if not 0 <= kept <= batch.global_batch:
            raise ValueError(f"want 0..{batch.global_batch} sequences that stay, got {kept}")
        return layers, kept * batch.sequences_per_sample, shape.sequence_length
    if not 0 < kept <= shape.sequence_length:
        raise ValueError(f"want a kept length in 1..{shape.sequence_length}, got {kept}")
    return layers, batch.in_sequences.global_batch, kept


def _layer_tokens(work: Work) -> int:
    layers, sequences, tokens = work
    return layers * sequences * tokens


def _rounded(amount: int, by: int) -> int:
    """A quotient as a whole number, halves upwards; exact for integers of any size."""
    return (2 * amount + by) // (2 * by)
