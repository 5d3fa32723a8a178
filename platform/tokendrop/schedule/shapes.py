"""The shapes that layers are called with: for each of them a compiler may make a graph."""

from collections.abc import Sequence

from tokendrop.schedule.plan import RunPlan, Segment

MOST_STATIC = 16
"""Shapes of a run that each have a graph of their own, at most: each of them takes its time to compile."""


def distinct(plan: RunPlan, *, start: int, world_size: int) -> Sequence[tuple[int, Segment]]:
    """What there is to train from a step on, each kind once and in order: sequences that a worker runs at a time, and
    the first segment that does so at its kept lengths, with its layers computed again or not."""
    ahead = [segment for segment in plan.segments if segment.stop > start]
    found = [(plan.split(segment, world_size).micro_batch, segment) for segment in reversed(ahead)]
    by_kind = {(size, segment.kept, segment.recomputes): (size, segment) for size, segment in found}
    return sorted(by_kind.values(), key=lambda one: one[1].start)


def layer_shapes(plan: RunPlan, *, world_size: int | None = None) -> frozenset[tuple[int, int, bool]]:
    """Sequences and tokens that layers are called with in training, and whether they compute these again.

    Args:
        world_size: of all steps; when left out, by the plan.
    """
    sees_everything = len(plan.dropped_layers) < plan.shape.layers
    full = (plan.shape.sequence_length,) if sees_everything else ()
    return frozenset(
        (size, tokens, segment.recomputes)
        for segment in plan.segments
        for size in [segment.micro_batch if world_size is None else plan.split(segment, world_size).micro_batch]
        for tokens in (*segment.kept, *full)
    )
