"""A whole run before it starts, with nodes lost at random: what it then takes, by what its workers do about it.

Follows what `ScalingDecider` (elastic/decide.py) does, from one event to the next. A node lost is asked for again at
once, and joins `node_start_s` later. Left out: the time in which a loss is noticed, and that of regular checkpoints.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, inf
from random import Random

from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.nodes import Nodes
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import change_s, step_s

_HOUR_S = 3600.0
_SETTLE_S = 2.0  # before fewer workers follow a group that failed, as in elastic/decide.py


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What the training steps, resizes and losses of one run took; validation and start-up are left out."""

    wall_clock_s: float
    gpu_hours: float
    """Of the devices that were held for the run's workers, those that waited among them."""
    useful_gpu_hours: float
    """Of the workers in the steps that lasted, each counted once."""
    losses: int
    steps_again: int
    """Steps that were done and lost, so done once more."""


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its step times
class Simulation:
    """A plan on nodes that are lost at random, and what is done about that."""

    plan: RunPlan
    profile: DeviceProfile
    sizes: Sequence[int]
    """Numbers of workers that share a step's micro batches evenly, rising."""
    checkpoint_steps: int
    """Between two checkpoints."""
    waits: bool
    """Whether a lost node is waited for; else the run goes on with the most workers that the others hold, and grows
    back."""
    patience_s: float = 0.0
    """So long a group of workers trains before one of more workers follows that are still fewer than planned."""

    def run(self, random: Random) -> SimulatedRun:
        """One run, with the losses that `random` draws: so many numbers for each, whatever the rate and the plan.

        Raises:
            ValueError: nodes are lost so often that the run does not end.
        """
        return _Run(self, Nodes(self.profile, random)).run()

    @cached_property
    def edges(self) -> tuple[list[int], list[int]]:
        """First steps of each number of workers, from 0, then the end of the run; and these numbers."""
        resizes = self.plan.resizes
        starts = [0, *(step for step, _, _ in resizes), self.plan.steps]
        return starts, [self.plan.segments[0].workers, *(after for _, _, after in resizes)]

    def target(self, step: float) -> int:
        """The plan's workers at a step."""
        starts, workers = self.edges
        return workers[bisect_right(starts, step) - 1]

    def clock(self, workers: int) -> "StepClock":
        """How long the steps take on so many workers throughout."""
        if workers not in self._clocks:
            self._clocks[workers] = StepClock(self.plan, self.profile, workers)
        return self._clocks[workers]

    @cached_property
    def _clocks(self) -> dict[int, "StepClock"]:
        return {}

    def restart_s(self, before: int, after: int) -> float:
        """Seconds until workers train who begin from a checkpoint of others."""
        if (before, after) not in self._restarts:
            self._restarts[before, after] = change_s(self.plan, self.profile, before, after, saves=False)
        return self._restarts[before, after]

    @cached_property
    def _restarts(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def save_s(self) -> float:
        """Seconds in which a checkpoint is written that workers wait for."""
        return change_s(self.plan, self.profile, 1, 1) - self.restart_s(1, 1)


class StepClock:
    """Seconds from the start of a run to any step, and back, were all steps done on so many workers."""

    def __init__(self, plan: RunPlan, profile: DeviceProfile, workers: int) -> None:
        self._starts = [segment.start for segment in plan.segments]
        self._step_s = [step_s(plan, profile, segment, workers) for segment in plan.segments]
        lengths = [segment.stop - segment.start for segment in plan.segments]
        self._before_s = [0.0, *accumulate(n * s for n, s in zip(lengths, self._step_s, strict=True))]

    def seconds(self, step: float) -> float:
        """Until so many steps are done; parts of a step count."""
        place = bisect_right(self._starts, step) - 1
        return self._before_s[place] + (step - self._starts[place]) * self._step_s[place]

    def step(self, seconds: float) -> float:
        """The steps that are done by then."""
        place = min(bisect_right(self._before_s, seconds), len(self._starts)) - 1
        return self._starts[place] + (seconds - self._before_s[place]) / self._step_s[place]


class _Run:
    """One run on its way."""

    def __init__(self, simulation: Simulation, nodes: Nodes) -> None:
        self.simulation, self.nodes = simulation, nodes
        self.step = 0.0
        self.workers = simulation.target(0)
        """0: a group has failed, and there is no other yet."""
        self.since = 0.0
        """When the group began to train, last went on as it was, or failed."""
        self.saved, self.saver = 0, self.workers
        """The last checkpoint, and the workers that wrote it."""
        self.useful_s, self.steps_again = 0.0, 0
        nodes.want(self.workers)

    def run(self) -> SimulatedRun:
        while self.step < self.simulation.plan.steps:
            if self.workers:
                self._train()
            else:
                self._restart()
        return SimulatedRun(
            wall_clock_s=self.nodes.now,
            gpu_hours=self.nodes.worker_s / _HOUR_S,
            useful_gpu_hours=self.useful_s / _HOUR_S,
            losses=self.nodes.losses,
            steps_again=self.steps_again,
        )

    def _fit(self) -> int:
        """The largest size of at most the target that there are places for; 0 where there is none, or it waits."""
        target, places = self.simulation.target(self.step), self.nodes.places
        if target <= places:
            return target
        fitting = 0 if self.simulation.waits else bisect_right(self.simulation.sizes, places)
        return self.simulation.sizes[fitting - 1] if fitting else 0

    def _want(self) -> int:
        """The workers that there should be now."""
        target, best = self.simulation.target(self.step), self._fit()
        if target < self.workers:
            return target
        is_due = best == target or self.nodes.now >= self.since + self.simulation.patience_s
        return best if best > self.workers and is_due else self.workers

    def _train(self) -> None:
        """To the next edge, or to the end of this step where other workers are to follow; a loss or a node may come."""
        clock, starts = self.simulation.clock(self.workers), self.simulation.edges[0]
        pauses = self._want() != self.workers
        goal = ceil(self.step) if pauses else starts[bisect_right(starts, self.step)]
        here_s = clock.seconds(self.step)
        to_goal_s, since = clock.seconds(goal) - here_s, self.nodes.now
        # some of what is missing may be there, to be taken once this group has trained for long enough
        grows = not pauses and self._fit() > self.workers
        patience_s = self.since + self.simulation.patience_s - since if grows else inf
        event = self.nodes.let_pass(min(to_goal_s, patience_s))
        self.useful_s += self.workers * (self.nodes.now - since)
        if event == "none" and to_goal_s <= patience_s:
            self._reach(goal)
            return
        self.step = min(clock.step(here_s + self.nodes.now - since), goal)
        if event == "lost" and self.nodes.hits(self.workers):
            self._fail()

    def _reach(self, step: int) -> None:
        """At a step where the group waits: save it, and go on as what should be now."""
        self.step = step
        if step == self.simulation.plan.steps:
            return
        before, target = self.workers, self.simulation.target(step)
        self.nodes.want(max(self.simulation.target(max(0, step - 1)), target))
        if not self._stays(self.simulation.save_s):
            self._fail()
            return
        self.saved, self.saver = step, before
        self.workers = self._want()
        if self.workers != before and not self._stays(self.simulation.restart_s(before, self.workers)):
            self.workers = 0
        else:
            self.nodes.want(target)
        self.since = self.nodes.now

    def _fail(self) -> None:
        """The group is gone, and with it what it did since its last checkpoint."""
        done, every = int(self.step), self.simulation.checkpoint_steps
        if (last := done - done % every) > self.saved:
            self.saved, self.saver = last, self.workers
        clock = self.simulation.clock(self.workers)
        self.useful_s -= self.workers * (clock.seconds(self.step) - clock.seconds(self.saved))
        self.steps_again += done - self.saved
        self.step, self.workers, self.since = self.saved, 0, self.nodes.now

    def _restart(self) -> None:
        """With as many workers as there may be, from the last checkpoint; or wait for a node."""
        target = self.simulation.target(self.step)
        self.nodes.want(target)
        size = self._fit()
        settles_s = self.since + min(self.simulation.patience_s, _SETTLE_S) - self.nodes.now
        if size == 0 or (size < target and settles_s > 0):
            self.nodes.let_pass(settles_s if size else inf)
            return
        self.workers = size
        if not self._stays(self.simulation.restart_s(self.saver, size)):
            self.workers = 0
        self.since = self.nodes.now

    def _stays(self, seconds: float) -> bool:
        """Let the group wait for so long; whether no loss hits it meanwhile."""
        end = self.nodes.now + seconds
        while (event := self.nodes.let_pass(max(0.0, end - self.nodes.now))) != "none":
            if event == "lost" and self.nodes.hits(self.workers):
                return False
        return True
