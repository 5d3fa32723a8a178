"""Legal schedules and plans for property tests."""

from dataclasses import replace
from fractions import Fraction

from hypothesis import strategies as st

from tokendrop.schedule.activations import Activations
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.device import DeviceProfile, Link, ModelSpeed, Point
from tokendrop.schedule.kept_by_step import Jumps, KeptByStep, Stages, in_buckets
from tokendrop.schedule.kept_length import Constant
from tokendrop.schedule.micro_batch import MicroBatchGrowth
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule

LONGEST_GROWTH = 200  # steps after which every schedule drawn here has ended its growth


@st.composite
def jumps(draw: st.DrawFn, full: int) -> Jumps:
    start = draw(st.integers(1, full))
    increment = draw(st.integers(max(1, -(-(full - start) // 10)), full))  # ten jumps at most
    interval = draw(st.fractions(Fraction(1, 4), 15, max_denominator=12))
    return Jumps(start=start, full=full, increment=increment, interval=interval)


@st.composite
def stages(draw: st.DrawFn, full: int) -> Stages:
    kept = sorted(draw(st.lists(st.integers(1, full), min_size=1, max_size=5)))
    later = st.lists(st.integers(1, LONGEST_GROWTH - 1), min_size=len(kept) - 1, max_size=len(kept) - 1, unique=True)
    return Stages(stages=tuple(zip([0, *sorted(draw(later))], kept, strict=True)))


def schedules(full: int) -> st.SearchStrategy[KeptByStep]:
    """Schedules whose kept lengths lie in 1..full."""
    exact = exact_schedules(full)
    return st.one_of(exact, st.builds(in_buckets, exact, st.integers(2, 12)))


def exact_schedules(full: int) -> st.SearchStrategy[KeptByStep]:
    """Those that are not rounded."""
    constant = st.integers(1, full).map(lambda kept: Constant(kept=kept))
    return st.one_of(constant, jumps(full), stages(full))


@st.composite
def batch_splits(draw: st.DrawFn) -> BatchSplit:
    micro, world, accumulation = (draw(st.integers(1, 6)) for _ in range(3))
    return BatchSplit(global_batch=micro * world * accumulation, micro_batch=micro, world_size=world)


@st.composite
def splits_in_groups(draw: st.DrawFn) -> BatchSplit:
    """Those of workers that train each micro batch in groups, too."""
    split, group = draw(batch_splits()), draw(st.integers(1, 4))
    return replace(split, world_size=group * split.world_size, group=group)


def growths() -> st.SearchStrategy[MicroBatchGrowth]:
    tokens = st.none() | st.just("auto") | st.integers(1, 1000)
    return st.builds(MicroBatchGrowth, tokens=tokens, activations=kept_activations())


def kept_activations() -> st.SearchStrategy[Activations]:
    """What micro batches keep, in bytes that have a limit or not; the limits are such as tiny models meet."""
    sizes = {"product_bytes": st.sampled_from([2, 4]), "has_dropout": st.booleans()}
    limits = st.none() | st.integers(0, 10**6)
    return st.builds(Activations, recomputed=st.booleans(), **sizes) | st.builds(Activations, limit=limits, **sizes)


@st.composite
def routes(draw: st.DrawFn, layers: int, most: int) -> tuple[RouteSchedule, ...]:
    """Spans of layers, apart and in order, each with a schedule of its own or one that it shares with others."""
    spans: list[tuple[int, int]] = []
    for layer in sorted(draw(st.sets(st.integers(0, layers - 1)))):
        joins = spans and spans[-1][1] == layer - 1 and draw(st.booleans())
        spans = [*spans[:-1], (spans[-1][0], layer)] if joins else [*spans, (layer, layer)]
    some = draw(st.lists(schedules(most), min_size=1, max_size=3))
    return tuple(RouteSchedule(span=span, kept=draw(st.sampled_from(some))) for span in spans)


@st.composite
def plans(draw: st.DrawFn, *, drops: bool = True, clock: str | None = None) -> RunPlan:
    layers, sequence_length = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    shape = ModelShape(
        layers=layers,
        width=draw(st.integers(1, 32)),
        sequence_length=sequence_length,
        vocab_size=draw(st.integers(1, 1000)),
        mlp_width=draw(st.integers(1, 128)),
        causal=draw(st.booleans()),
    )
    steps = draw(st.integers(1, LONGEST_GROWTH))
    batch = draw(batch_splits())
    counts = draw(st.sampled_from(["tokens", "sequences"]))
    most = sequence_length if counts == "tokens" else batch.global_batch
    peak = draw(st.floats(1e-6, 1.0))
    plan = build_plan(
        steps=steps,
        routes=draw(routes(layers, most)) if drops else (),
        counts=counts,
        shape=shape,
        batch=batch,
        lr_clock=clock or draw(st.sampled_from(["step", "layer_token"])),
        warmup_steps=0,
        peak_lr=peak,
        final_lr=peak * draw(st.floats(0, 1)),
        decay=draw(st.sampled_from(["linear", "cosine", "constant"])),
        growth=draw(growths()),
    )
    return with_warmup(plan, share=draw(st.floats(0, 1)))


def with_warmup(plan: RunPlan, *, share: float) -> RunPlan:
    """The plan with a warm-up of whole steps, as long as `share` of the longest one that fits."""
    rate, per_step = plan.learning_rate, 1
    if plan.lr_clock == "layer_token":
        per_step = plan.batch.global_batch * plan.shape.layers * plan.shape.sequence_length
    warmup = int(share * (rate.decay_length // per_step)) * per_step
    return replace(plan, learning_rate=replace(rate, warmup=warmup, decay_length=rate.decay_length - warmup))


_SECONDS = {(16, 1): 0.2, (64, 1): 0.5, (16, 4): 0.6, (64, 4): 1.8}  # by kept length and micro batch
MEASURED = DeviceProfile(
    name="test",
    kind="measured",
    source="made up",
    speeds=(
        ModelSpeed(
            model="six layers",
            shape=ModelShape(layers=6, width=64, sequence_length=64, vocab_size=500, mlp_width=256, causal=True),
            dropped_layers=4,
            points=tuple(Point(kept_length=k, micro_batch=m, seconds=s) for (k, m), s in _SECONDS.items()),
        ),
    ),
    devices_per_node=4,
    within_node=Link(bytes_per_s=1e9, latency_s=1e-5),
    between_nodes=Link(bytes_per_s=1e8, latency_s=1e-4),
    checkpoint_bytes_per_s=1e8,
    resize_s=5.0,
)
