"""What is right for a run that follows its plan of workers, as the cluster allows: decisions alone, without Ray."""

from dataclasses import dataclass
from enum import Enum, auto

from tokendrop.schedule.plan import RunPlan

_WARM_S = 30.0  # so long before workers change, the processes of the next ones may start
_SETTLE_S = 2.0  # until the cluster knows that the workers of a group that failed are gone


class ScalingAction(Enum):
    """What a group of workers is to do, where it is not to be replaced by one of another size."""

    STAY = auto()
    PAUSE = auto()
    GO_ON = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A running group and the cluster around it."""

    now: float
    have: int
    since: float
    """When the group started, or last went on as it was."""
    done: int
    possible: int
    """Workers that the cluster could hold now, this group's own places among them, nodes that leave left out."""
    waits: bool = False
    step_time_s: float = 0.0
    """0: not known."""
    staying: int = 0
    """Workers of this group on nodes that will not go away."""
    leaving: frozenset[str] = frozenset()
    """Nodes below this group that will go away."""


@dataclass(slots=True, kw_only=True)
class ScalingDecider:
    """Decides for one run.

    A group is replaced only while it waits at a committed step, so no step is lost or done twice. At a planned edge it
    waits by itself; for all other changes it is asked to pause first.
    """

    plan: RunPlan
    sizes: tuple[int, ...]
    """Numbers of workers that share a step's micro batches evenly, rising."""
    lead_s: float
    patience_s: float
    _saved_from: frozenset[str] = frozenset()
    _unmet_since: float | None = None
    _asked_for: int | None = None

    def target(self, step: int) -> int:
        """The plan's workers for the step after `step` steps."""
        return self.plan.at(min(step, self.plan.steps - 1)).workers

    def fit(self, workers: int) -> int:
        """The largest legal size of at most so many workers; 0 where there is none."""
        return max((size for size in self.sizes if size <= workers), default=0)

    def next_change(self, view: ClusterView) -> tuple[int, float]:
        """The workers after the next planned edge, and the seconds until it comes."""
        edge = self.plan.next_resize(view.done)
        is_known = edge < self.plan.steps and view.step_time_s > 0
        return self.target(edge), (edge - view.done) * view.step_time_s if is_known else float("inf")

    def next_size(self, view: ClusterView, *, pauses: bool) -> int:
        """The workers that follow this group's within seconds, its own number where none do.

        Args:
            pauses: it is asked to pause.
        """
        soon, in_s = self.next_change(view)
        return self.want(view) if pauses else soon if in_s <= _WARM_S else view.have

    def start(self, step: int, *, possible: int, waited_s: float, is_restart: bool) -> int:
        """The size to start with; 0 to wait. A run that has begun takes what there is, and grows as nodes come."""
        best = self.fit(min(self.target(step), possible))
        patience_s = min(self.patience_s, _SETTLE_S) if is_restart else self.patience_s
        return best if best == self.target(step) or waited_s >= patience_s else 0

    def request(self, view: ClusterView) -> int:
        """Workers to ask the cluster for, above those that it would hold anyway: 0 where all are there.

        An autoscaler that can't have all of them starts none: what it does not meet in time is followed by less.
        """
        soon, in_s = self.next_change(view)
        edge = self.plan.next_resize(view.done)
        if in_s <= self.lead_s:  # from here on, even where steps turn out to take longer than they seemed to
            self._asked_for = edge
        wanted = max(self.target(view.done), soon if self._asked_for == edge else 0)
        if wanted <= view.have and not view.leaving:
            self._unmet_since = None
            return 0
        if view.possible >= wanted:
            self._unmet_since = None
            return wanted
        self._unmet_since = view.now if self._unmet_since is None else self._unmet_since
        choices = [size for size in reversed(self.sizes) if view.have < size <= wanted] or [wanted]
        turn = int((view.now - self._unmet_since) // max(self.patience_s, 1.0))
        return choices[turn % len(choices)]

    def want(self, view: ClusterView) -> int:
        """The workers that there should be now, of those that there could be."""
        target = self.target(view.done)
        best = self.fit(min(target, view.possible))
        if view.leaving:
            return best or view.have
        if target < view.have:
            return target
        if best > view.have and (best == target or view.now - view.since >= self.patience_s):
            return best
        return view.have

    def decide(self, view: ClusterView) -> ScalingAction | int:
        """What to do with a running group; a number is the size of the one to replace it with, now."""
        if view.done >= self.plan.steps:
            return ScalingAction.STAY
        want = self.want(view)
        # off nodes that will go away; where there are no others, the state is saved once, and work goes on until then
        moves = bool(view.leaving) and self.fit(min(self.target(view.done), view.possible)) > 0
        if want != view.have or moves:
            return want if view.waits else ScalingAction.PAUSE
        if view.waits:
            self._saved_from = view.leaving
            return ScalingAction.GO_ON
        return ScalingAction.STAY if view.leaving <= self._saved_from else ScalingAction.PAUSE
