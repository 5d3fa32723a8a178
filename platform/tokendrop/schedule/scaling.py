"""How many workers each part of a run should have, and what the run then takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, expm1
from typing import Literal

from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan, Segment
from tokendrop.schedule.search import Pair, Stages, best_route, total

Sizes = tuple[tuple[int, int], ...]
"""(first step, workers), by rising steps from 0."""
_HOUR_S, _MOST_PARTS = 3600.0, 128
_ENDLESS = 100.0  # losses while the steps between two checkpoints are done: such a run never ends
_MOST_ESTIMATES, _MOST_TURNS = 200_000, 2_000_000  # some seconds each

Minimised = Literal["cost", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingObjective:
    """What a plan of workers is to be good at; a worker is one device."""

    min_workers: int
    max_workers: int
    minimise: Minimised
    limit: float | None = None
    """Hours where cost is minimised, GPU-hours where time is; None for no limit."""
    usd_per_gpu_hour: float | None = None
    """Where the limit was given in USD, the price that made it GPU-hours: messages are in USD then."""
    checkpoint_steps: int | None = None
    """As of `estimate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the training steps and resizes of a run take; validation and start-up are left out."""

    wall_clock_s: float
    gpu_hours: float
    cost: float | None
    """USD; None where the profile has no price."""


def with_workers(plan: RunPlan, sizes: Sequence[tuple[int, int]]) -> RunPlan:
    """The same run on other workers; segments are cut where the workers change.

    Raises:
        ValueError: the sizes don't start at step 0, don't rise, or don't divide the micro batches of a step.
    """
    starts = [start for start, _ in sizes]
    if not starts or starts[0] != 0 or any(one >= two for one, two in pairwise(starts)) or starts[-1] >= plan.steps:
        raise ValueError(f"want first steps that rise from 0 and lie below {plan.steps}, got {starts}")
    return replace(plan, segments=tuple(_cut(plan, sizes)))


def _cut(plan: RunPlan, sizes: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    ends = [start for start, _ in sizes[1:]] + [plan.steps]
    for (first, workers), end in zip(sizes, ends, strict=True):
        for segment in plan.segments:
            start, stop = max(first, segment.start), min(end, segment.stop)
            if start < stop:
                split = plan.split(segment, workers)
                yield replace(
                    segment,
                    start=start,
                    stop=stop,
                    workers=workers,
                    micro_batch=split.micro_batch,
                    accumulation=split.accumulation,
                    layer_tokens_before=plan.layer_tokens(start),
                    flops_before=plan.flops(start),
                )


def estimate(plan: RunPlan, profile: DeviceProfile, checkpoint_steps: int | None = None) -> Estimate:
    """Wall clock, GPU-hours and cost of a run as its plan has it.

    While workers change, the larger number of them waits and is paid for.

    Args:
        checkpoint_steps: between two checkpoints; with them, what the profile's losses of nodes are expected to take
            is part of it (`losses_s`). None leaves losses out.
    """
    lost = [losses_s(plan, profile, s, s.workers, checkpoint_steps) for s in plan.segments]
    steps = [(s.workers, (s.stop - s.start) * step_s(plan, profile, s, s.workers)) for s in plan.segments]
    steps += [(max(before, after), pause_s(plan, profile, before, after)) for _, before, after in plan.resizes]
    gpu_hours = sum(workers * seconds for workers, seconds in steps) / _HOUR_S + sum(w for _, w in lost) / _HOUR_S
    price = profile.usd_per_gpu_hour
    return Estimate(
        wall_clock_s=sum(seconds for _, seconds in steps) + sum(seconds for seconds, _ in lost),
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours * price,
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run takes until `step` steps are done, and each step from there on, changes of workers included."""

    step: int
    wall_clock_s: float
    worker_s: float
    step_s: float
    workers: int

    def at(self, step: int) -> "Expected":
        """The same at a later step before anything changes."""
        seconds = (step - self.step) * self.step_s
        return replace(
            self, step=step, wall_clock_s=self.wall_clock_s + seconds, worker_s=self.worker_s + seconds * self.workers
        )


def expected_course(plan: RunPlan, profile: DeviceProfile) -> list[Expected]:
    """What `estimate` adds up without losses, at the first step of each segment."""
    course: list[Expected] = []
    seconds = worker_s = 0.0
    workers = plan.segments[0].workers
    for segment in plan.segments:
        if course:
            before = course[-1].at(segment.start)
            pause = pause_s(plan, profile, workers, segment.workers)
            seconds, worker_s = before.wall_clock_s + pause, before.worker_s + pause * max(workers, segment.workers)
        workers = segment.workers
        course.append(Expected(segment.start, seconds, worker_s, step_s(plan, profile, segment, workers), workers))
    return course


def stretches_s(plan: RunPlan, profile: DeviceProfile) -> list[float]:
    """Seconds of the steps between two changes of workers, each in turn."""
    seconds = [0.0]
    for before, segment in zip((None, *plan.segments), plan.segments, strict=False):
        if before is not None and before.workers != segment.workers:
            seconds.append(0.0)
        seconds[-1] += (segment.stop - segment.start) * step_s(plan, profile, segment, segment.workers)
    return seconds


def step_s(plan: RunPlan, profile: DeviceProfile, segment: Segment, workers: int) -> float:
    """Seconds of one step of a segment on so many workers."""
    batch = plan.split(segment, workers).in_sequences
    flops = segment.flops_per_step / batch.global_batch
    share = plan.group_share(segment)
    return profile.step_s(plan.shape, flops=flops, batch=batch, sharding=plan.sharding, share=share)


def pause_s(plan: RunPlan, profile: DeviceProfile, before: int, after: int) -> float:
    """Seconds of one change of workers; 0 where they stay as many."""
    return change_s(plan, profile, before, after) if before != after else 0.0


def change_s(plan: RunPlan, profile: DeviceProfile, before: int, after: int, *, saves: bool = True) -> float:
    """Seconds until others, or as many anew, train in the workers' place; after a loss no checkpoint is written."""
    how = {"before": before, "after": after, "state_bytes": plan.state_bytes}
    share = plan.group_share(plan.segments[0])  # what a worker holds is the same in all segments
    return profile.pause_s(plan.shape, **how, sharding=plan.sharding, saves=saves, share=share)


def losses_s(
    plan: RunPlan, profile: DeviceProfile, segment: Segment, workers: int, checkpoint_steps: int | None
) -> tuple[float, float]:
    """What lost nodes are expected to take from a segment on so many workers: seconds, and workers by seconds.

    Losses come at a constant rate. Each costs the steps since the last checkpoint, a restart, and the start of another
    node, during which the remaining ones wait and are paid for. So the steps between two checkpoints, of T seconds, are
    done once without a loss after exp(rate x T) - 1 attempts with one. Losses during a restart or a wait are left out;
    so is that elastic workers go on with fewer of them, which saves some of the wait and costs a second pause.
    """
    if checkpoint_steps is None or not profile.node_losses_per_hour:
        return 0.0, 0.0
    nodes, one_s = ceil(workers / profile.devices_per_node), step_s(plan, profile, segment, workers)
    rate, interval = profile.node_losses_per_hour / _HOUR_S * nodes, min(checkpoint_steps, plan.steps)
    at_once = expm1(min(rate * interval * one_s, _ENDLESS))  # losses until one interval is done
    losses = (segment.stop - segment.start) / interval * at_once
    again_s = losses / rate - (segment.stop - segment.start) * one_s
    held_up_s = again_s + losses * change_s(plan, profile, workers, workers, saves=False)
    waited_s = losses * (profile.node_start_s or 0.0)
    return held_up_s + waited_s, held_up_s * workers + waited_s * (nodes - 1) * profile.devices_per_node


@lru_cache(maxsize=64)
def choose_sizes(plan: RunPlan, profile: DeviceProfile, objective: ScalingObjective) -> Sizes:
    """Workers of each kept-length stage, neighbours of one size merged.

    Without a limit they are the best there are for the objective; with one they keep it, and `best_route` says how
    good they are: no worse than any fixed size that keeps it.

    Where a run has more than 128 stages, as many neighbours are taken together as bring them below that.

    Raises:
        ValueError: no size divides the micro batches of a step, or no choice keeps the limit.
    """
    options = legal_sizes(plan, objective)
    parts = _parts(plan.segments)
    if len(options) * len(plan.segments) > _MOST_ESTIMATES or len(options) ** 2 * len(parts) > _MOST_TURNS:
        raise ValueError(
            f"{len(options)} numbers of workers for {len(plan.segments)} kept lengths are too many to choose from;"
            " want min_workers and max_workers closer together, or a larger drop.schedule.increment"
        )
    stages = [[_pair(objective, *_hours(plan, profile, part, w, objective)) for w in options] for part in parts]
    pauses = {(v, w): pause_s(plan, profile, v, w) / _HOUR_S for v in options for w in options}
    turns = [[_pair(objective, pauses[v, w], pauses[v, w] * max(v, w)) for w in options] for v in options]
    route = best_route(stages, turns, objective.limit)
    if route is None:
        raise ValueError(_too_little(objective, _least(stages, turns)))
    sizes = [(part[0].start, options[option]) for part, option in zip(parts, route, strict=True)]
    return tuple(size for i, size in enumerate(sizes) if i == 0 or size[1] != sizes[i - 1][1])


def legal_sizes(plan: RunPlan, objective: ScalingObjective) -> list[int]:
    """Numbers of workers that share the micro batches of a step evenly.

    Raises:
        ValueError: there is none between the objective's bounds.
    """
    batch, least, most = plan.batch, objective.min_workers, objective.max_workers
    legal = batch.world_sizes(least, most)
    if not legal:
        smaller = batch.world_sizes(1, least)
        groups = f", in groups of {batch.group}," if batch.group > 1 else ""
        next_one = f"the next one below is {smaller[-1]}" if smaller else f"want at least {batch.group}"
        raise ValueError(
            f"no number of workers from {least} to {most}{groups} divides the"
            f" {batch.global_batch // batch.micro_batch} micro batches of a step; {next_one}"
        )
    return legal


def _parts(segments: Sequence[Segment]) -> list[Sequence[Segment]]:
    size = ceil(len(segments) / _MOST_PARTS)
    return [segments[i : i + size] for i in range(0, len(segments), size)]


def _hours(
    plan: RunPlan, profile: DeviceProfile, part: Sequence[Segment], workers: int, objective: ScalingObjective
) -> tuple[float, float]:
    """Hours and GPU-hours, with what losses are expected to take."""
    hours = sum((s.stop - s.start) * step_s(plan, profile, s, workers) for s in part) / _HOUR_S
    lost = [losses_s(plan, profile, s, workers, objective.checkpoint_steps) for s in part]
    return hours + sum(s for s, _ in lost) / _HOUR_S, hours * workers + sum(w for _, w in lost) / _HOUR_S


def _pair(objective: ScalingObjective, hours: float, gpu_hours: float) -> Pair:
    return (gpu_hours, hours) if objective.minimise == "cost" else (hours, gpu_hours)


def _least(stages: Stages, turns: Stages) -> float:
    """The least that the limited sum can be."""
    swapped, swapped_turns = ([[(b, a) for a, b in row] for row in rows] for rows in (stages, turns))
    route = best_route(swapped, swapped_turns)
    assert route is not None
    return total(swapped, swapped_turns, route)[0]


def _too_little(objective: ScalingObjective, least: float) -> str:
    assert objective.limit is not None
    among = f"with {objective.min_workers} to {objective.max_workers} workers this run takes"
    if objective.minimise == "cost":
        return f"deadline_hours={objective.limit:g} can't be met: {among} {_upwards(least)} hours at least"
    if price := objective.usd_per_gpu_hour:
        return f"budget_usd={objective.limit * price:g} can't be kept: {among} {_upwards(least * price)} at least"
    return f"budget_gpu_hours={objective.limit:g} can't be kept: {among} {_upwards(least)} at least"


def _upwards(number: float) -> str:
    """With two decimals, and never less than the number: who takes it for a limit can keep it."""
    return f"{ceil(number * 100 + 1e-6) / 100:.2f}"
