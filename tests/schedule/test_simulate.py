"""Simulated runs: what losses of nodes can't change, and what they take on average."""

from dataclasses import replace
from math import ceil, inf
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.elastic import decide
from tokendrop.elastic.decide import ClusterView, ScalingDecider
from tokendrop.schedule import simulate
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.device import DeviceProfile, Link, ModelSpeed, Point
from tokendrop.schedule.nodes import Nodes
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.scaling import ScalingObjective, estimate, legal_sizes, with_workers
from tokendrop.schedule.simulate import SimulatedRun, Simulation, _Run

AT_ONCE = Link(bytes_per_s=1e18, latency_s=0.0)
SLOW = Link(bytes_per_s=1e4, latency_s=1.0)


@st.composite
def simulations(
    draw: st.DrawFn, *, waits: bool | None = None, link: Link | None = None, resizes: bool = True
) -> Simulation:
    """Plans that change workers now and then, or never where losses are waited for; some losses in each run."""
    plan = draw(plans())
    sizes = legal_sizes(plan, ScalingObjective(min_workers=1, max_workers=8, minimise="time"))
    waits = draw(st.booleans()) if waits is None else waits
    starts = {0} if waits or not resizes else draw(st.sets(st.integers(0, plan.steps - 1), max_size=4)) | {0}
    plan = with_workers(plan, [(start, draw(st.sampled_from(sizes))) for start in sorted(starts)])
    points = (
        Point(kept_length=plan.shape.sequence_length, seconds=1000.0),
        Point(kept_length=1, seconds=draw(st.floats(200, 1000))),
    )
    speed = ModelSpeed(model="x", shape=plan.shape, dropped_layers=0, points=points)
    link = draw(st.sampled_from([AT_ONCE, SLOW])) if link is None else link
    profile = replace(
        MEASURED,
        speeds=(speed,),
        devices_per_node=draw(st.integers(1, 4)),
        within_node=link,
        between_nodes=link,
        checkpoint_bytes_per_s=draw(st.sampled_from([1e3, 1e12])),
        resize_s=0.0,
    )
    whole_s = estimate(plan, profile).wall_clock_s
    shares = st.sampled_from([0.0, 0.01, 0.1])
    profile = replace(profile, resize_s=whole_s * draw(shares), node_start_s=whole_s * draw(shares))
    return Simulation(
        plan=plan,
        profile=with_losses(plan, profile, draw(st.sampled_from([0.5, 3.0]))),
        sizes=sizes,
        checkpoint_steps=draw(st.integers(1, plan.steps)),
        waits=waits,
        patience_s=whole_s * draw(shares),
    )


def with_losses(plan: RunPlan, profile: DeviceProfile, losses: float) -> DeviceProfile:
    """So many in a run of this plan, were none of its steps done again."""
    hours = estimate(plan, profile).wall_clock_s / 3600
    nodes = max(ceil(segment.workers / profile.devices_per_node) for segment in plan.segments)
    return replace(profile, node_losses_per_hour=losses / (hours * nodes))


def runs(simulation: Simulation, number: int, *, losses: float = 1.0) -> list[SimulatedRun]:
    """So many runs, at so many times the rate of losses."""
    profile = simulation.profile
    simulation = replace(
        simulation, profile=replace(profile, node_losses_per_hour=losses * profile.node_losses_per_hour)
    )
    return [simulation.run(Random(f"{seed}")) for seed in range(number)]


@given(simulations())
def test_without_losses_it_takes_what_the_plan_does(simulation: Simulation) -> None:
    (run,), taken = runs(simulation, 1, losses=0), estimate(simulation.plan, simulation.profile)
    assert run.wall_clock_s == pytest.approx(taken.wall_clock_s, rel=1e-9)
    assert run.gpu_hours == pytest.approx(taken.gpu_hours, rel=1e-9)
    assert (run.losses, run.steps_again) == (0, 0)


@given(simulations(link=AT_ONCE))
def test_every_run_does_all_its_steps(simulation: Simulation) -> None:
    """Where workers send each other nothing, a step takes the same of them together, however many they are."""
    plan, profile = simulation.plan, replace(simulation.profile, resize_s=0.0, checkpoint_bytes_per_s=1e18)
    steps = estimate(with_workers(plan, [(0, 1)]), profile).gpu_hours
    for run in runs(simulation, 5):
        assert run.useful_gpu_hours == pytest.approx(steps, rel=1e-9)
        assert run.useful_gpu_hours <= run.gpu_hours * (1 + 1e-9)


@given(simulations())
def test_what_is_paid_for_is_what_is_held(simulation: Simulation) -> None:
    workers = [segment.workers for segment in simulation.plan.segments]
    for run in runs(simulation, 5):
        assert run.useful_gpu_hours <= run.gpu_hours * (1 + 1e-9)
        assert run.gpu_hours <= max(workers) * run.wall_clock_s / 3600 * (1 + 1e-9)
        assert run.steps_again <= run.losses * simulation.checkpoint_steps


@given(simulations(link=AT_ONCE, resizes=False))
def test_more_losses_never_make_a_run_shorter_on_average(simulation: Simulation) -> None:
    """The same draws; what single runs gain by a loss at a better time evens out, but for three standard errors."""
    some, more = (runs(simulation, 40, losses=losses) for losses in (0.5, 1.5))
    longer = [two.wall_clock_s - one.wall_clock_s for one, two in zip(some, more, strict=True)]
    assert fmean(longer) >= -3 * stdev(longer) / len(longer) ** 0.5
    (least,) = runs(simulation, 1, losses=0)
    assert all(run.wall_clock_s >= least.wall_clock_s * (1 - 1e-9) for run in some)


@given(simulations(), st.integers(0, 2**31))
def test_a_seed_gives_one_run(simulation: Simulation, seed: int) -> None:
    assert simulation.run(Random(seed)) == replace(simulation).run(Random(seed))


def test_seeds_differ() -> None:
    found = runs(long_run(waits=True, node_start_s=0.0, losses=3.0), 20)
    assert len({run.wall_clock_s for run in found}) > 10


def long_run(*, waits: bool, node_start_s: float, losses: float = 0.05) -> Simulation:
    """400 steps on 8 devices of 2 nodes, a checkpoint each 40 steps, half a minute to write one, and so many losses."""
    plan = with_workers(plan_of(400), [(0, 8)])
    profile = replace(MEASURED, node_start_s=node_start_s, checkpoint_bytes_per_s=1e5, restore_bytes_per_s=1e6)
    return Simulation(
        plan=plan,
        profile=with_losses(plan, profile, losses),
        sizes=[1, 2, 4, 8],
        checkpoint_steps=40,
        waits=waits,
        patience_s=60.0,
    )


def plan_of(steps: int) -> RunPlan:
    return build_plan(
        steps=steps,
        routes=[],
        shape=MEASURED.speeds[0].shape,
        batch=BatchSplit(global_batch=8, micro_batch=1, world_size=1),
        lr_clock="step",
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
    )


@pytest.mark.parametrize(("waits", "node_start_s"), [(True, 0.0), (True, 60.0), (False, 0.0)])
def test_few_losses_take_what_is_expected_of_them(waits: bool, node_start_s: float) -> None:
    """Within four standard errors, and a tenth of it for two losses in one run."""
    simulation = long_run(waits=waits, node_start_s=node_start_s)
    plan, profile = simulation.plan, simulation.profile
    none, some = estimate(plan, profile), estimate(plan, profile, simulation.checkpoint_steps)
    found = runs(simulation, 6000)
    for taken, without, expected in (
        ([run.wall_clock_s for run in found], none.wall_clock_s, some.wall_clock_s),
        ([run.gpu_hours for run in found], none.gpu_hours, some.gpu_hours),
    ):
        error = stdev(taken) / len(taken) ** 0.5
        assert abs(fmean(taken) - expected) <= 4 * error + 0.1 * (expected - without)
        assert fmean(taken) - without > 6 * error  # what is found could be told from nothing


def test_many_losses_between_two_checkpoints_take_what_is_expected_of_them() -> None:
    """One on average while 40 steps are done: these are begun e times until they are done once."""
    simulation = long_run(waits=True, node_start_s=0.0, losses=10.0)
    plan, profile = simulation.plan, replace(simulation.profile, resize_s=0.0, restore_bytes_per_s=1e18)
    expected = estimate(plan, profile, simulation.checkpoint_steps)
    found = runs(replace(simulation, profile=profile), 300)
    assert fmean(run.wall_clock_s for run in found) == pytest.approx(expected.wall_clock_s, rel=0.1)
    assert fmean(run.gpu_hours for run in found) == pytest.approx(expected.gpu_hours, rel=0.1)
    assert expected.wall_clock_s > 1.6 * estimate(plan, profile).wall_clock_s


@given(simulations(waits=False), st.data())
def test_it_wants_the_workers_that_the_run_itself_would(simulation: Simulation, data: st.DataObject) -> None:
    plan = simulation.plan
    run = _Run(simulation, Nodes(simulation.profile, Random(1)))
    for _ in range(data.draw(st.integers(0, 4))):
        run.nodes.let_pass(data.draw(st.floats(0, 1e9)))
    run.step = float(data.draw(st.integers(0, plan.steps - 1)))
    run.workers = data.draw(st.sampled_from([size for size in simulation.sizes if size <= max(1, run.nodes.places)]))
    run.since = run.nodes.now - simulation.patience_s * data.draw(st.sampled_from([0.5, 2.0]))
    decider = ScalingDecider(plan=plan, sizes=tuple(simulation.sizes), lead_s=0.0, patience_s=run.simulation.patience_s)
    view = ClusterView(
        now=run.nodes.now, have=run.workers, since=run.since, done=int(run.step), possible=run.nodes.places
    )
    assert run._want() == decider.want(view)
    assert simulate._SETTLE_S == decide._SETTLE_S
    assert run._fit() == decider.start(int(run.step), possible=run.nodes.places, waited_s=1e9, is_restart=True)


class Asked(Nodes):
    """Nodes that tell how many workers they were wanted for."""

    most = 0

    def want(self, workers: int) -> None:
        self.most = max(self.most, workers)
        super().want(workers)


@given(simulations(waits=False))
def test_before_its_first_step_a_run_asks_for_its_first_workers_alone(simulation: Simulation) -> None:
    """As where one was lost before, and comes back."""
    run = _Run(simulation, nodes := Asked(simulation.profile, Random(1)))
    run.workers = simulation.sizes[0]
    run._reach(0)
    assert nodes.most == simulation.target(0)


def test_a_loss_hits_a_group_by_its_share_of_the_nodes() -> None:
    profile = replace(MEASURED, node_losses_per_hour=1.0)
    hits = 0
    for seed in range(2000):
        nodes = Nodes(profile, Random(f"{seed}"))
        nodes.want(5 * profile.devices_per_node)
        assert nodes.let_pass(1e9) == "lost"
        hits += nodes.hits(profile.devices_per_node + 1)
    assert hits / 2000 == pytest.approx(2 / 5, abs=4 * (0.4 * 0.6 / 2000) ** 0.5)


@pytest.mark.parametrize("waits", [True, False])
def test_a_run_that_makes_no_headway_is_ended(waits: bool) -> None:
    simulation = long_run(waits=waits, node_start_s=0.0, losses=400.0)
    with pytest.raises(ValueError, match="has lost 100,000 nodes and is not done"):
        simulation.run(Random(0))


class Script(Random):
    """Losses after so many seconds of nodes each, and each the loss of a node at this share of those that are held."""

    def __init__(self, *losses: tuple[float, float]) -> None:
        super().__init__(0)
        self.after = [after for after, _ in losses]
        self.shares = [share for _, share in losses]

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.after.pop(0) if self.after else inf

    def random(self) -> float:
        return self.shares.pop(0)


@pytest.mark.parametrize("after_s", [4.0, 400.0], ids=["while the group starts", "while it trains"])
def test_a_node_that_nobody_works_on_is_lost_without_a_halt(after_s: float) -> None:
    """Of 8 nodes one is lost, and then one of 7 of which a single one has a worker."""
    long = long_run(waits=False, node_start_s=1e9)
    simulation = replace(long, profile=replace(long.profile, devices_per_node=1), sizes=[1, 8])
    one = simulation.run(Script((8 * 10.0, 0.0)))
    idle, hit = (simulation.run(Script((8 * 10.0, 0.0), (7 * after_s, share))) for share in (0.5, 0.0))
    assert (one.losses, idle.losses, hit.losses) == (1, 2, 2)
    assert (idle.wall_clock_s, idle.steps_again) == (pytest.approx(one.wall_clock_s), one.steps_again)
    assert idle.gpu_hours < one.gpu_hours
    assert hit.wall_clock_s > one.wall_clock_s + 0.99
