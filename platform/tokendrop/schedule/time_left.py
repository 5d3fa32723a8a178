"""How long the rest of a run takes: by what its steps took until now, and by what the plan asks of those to come."""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan, Segment
from tokendrop.schedule.scaling import pause_s, step_s

_LATELY = 50  # steps by which the speed is known; fewer would make the time left jump about


class TimeLeft:
    """Learns how fast a run is.

    A step costs what the profile says; without a profile, its FLOPs over its workers. What was measured says by how
    much costs are to be multiplied, so a stretch with other kept lengths or workers takes other times.
    """

    def __init__(self, plan: RunPlan, profile: DeviceProfile | None = None) -> None:
        self.profile = profile
        self.follow(plan)
        self._lately: deque[tuple[float, float]] = deque(maxlen=_LATELY)  # seconds and costs of steps
        self._steps = 0
        self._pauses: list[float] = []

    def follow(self, plan: RunPlan) -> None:
        """Go by another plan of the same run."""
        self.plan = plan
        costs = [self._cost(segment, segment.workers) for segment in plan.segments]
        lengths = [segment.stop - segment.start for segment in plan.segments]
        self._costs = costs
        self._before = [0.0, *accumulate(cost * steps for cost, steps in zip(costs, lengths, strict=True))]

    def take(self, step: int, *, step_time_s: float, workers: int) -> None:
        """Take in a step.

        Args:
            step: steps done, this one included.
        """
        if self._steps == 1:
            self._lately.clear()  # the first step of all warms up, and says little
        self._lately.append((step_time_s, self._cost(self.plan.at(step - 1), workers)))
        self._steps += 1

    def take_pause(self, seconds: float) -> None:
        """Take in a change of workers."""
        self._pauses.append(seconds)

    def step_s(self, step: int, workers: int) -> float | None:
        """Seconds of one step; None before the first was taken in."""
        return self._factor() * self._cost(self.plan.at(step), workers) if self._steps else None

    def until(self, stop: int, *, done: int) -> float | None:
        """Seconds from `done` steps to `stop`, changes of workers between them included; None before the first step."""
        if not self._steps:
            return None
        resizes = [(before, after) for step, before, after in self.plan.resizes if done <= step < stop]
        if self._pauses:
            paused = len(resizes) * sum(self._pauses) / len(self._pauses)
        elif self.profile is not None:
            paused = sum(pause_s(self.plan, self.profile, before, after) for before, after in resizes)
        else:
            paused = 0.0
        return self._factor() * (self._cost_before(stop) - self._cost_before(done)) + paused

    def _factor(self) -> float:
        """Seconds for a cost of 1."""
        return sum(seconds for seconds, _ in self._lately) / sum(cost for _, cost in self._lately)

    def _cost(self, segment: Segment, workers: int) -> float:
        if self.profile is not None:
            is_legal = workers in self.plan.batch.world_sizes(workers, workers)  # else of an earlier start's batches
            return step_s(self.plan, self.profile, segment, workers if is_legal else segment.workers)
        return segment.flops_per_step / workers

    def _cost_before(self, step: int) -> float:
        place = min(bisect_right(self.plan.segments, step, key=lambda one: one.start), len(self._costs)) - 1
        return self._before[place] + (step - self.plan.segments[place].start) * self._costs[place]
