"""Ray Train told by a plan when its group of workers is replaced by one of another size.

Ray Train can do that, but knows only how to grow whenever it can. Its scaling policy is no documented API: this file
and `standby` name all that they use of Ray's private parts, checked with Ray 2.60 and held by a test.
"""

import os
import time
from collections import Counter
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray._raylet import RAY_NODE_ID_KEY  # pyright: ignore[reportAttributeAccessIssue]
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import GetTimeoutError, RayError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision

from tokendrop.elastic.control import RunControl
from tokendrop.elastic.decide import ClusterView, ScalingAction, ScalingDecider
from tokendrop.elastic.progress import Progress
from tokendrop.elastic.standby import StandbyPool
from tokendrop.track.decisions import DecidedJob
from tokendrop.track.run_home import steps_done

_CALL_S = 5.0  # for an answer of Ray's coordinator
_IDLE_S = 0.25  # between two looks at a cluster whose nodes are waited for
_FREE_S = 1.5  # for a cluster to notice that workers are gone
_PLACE_S = 5.0  # for which room that was seen is waited for; another run may have taken it since
# of the process of Ray's controller, which reads them as it starts
_CONTROLLER = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # it keeps workers on a node that goes; this policy moves them off
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_PLACE_S),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # so often the policy is asked
}


class RunStoppedError(Exception):
    """The driver has stopped the run while it waited for room."""


class SchedulePolicy(ElasticScalingPolicy):
    """Tells Ray Train what a `ScalingDecider` decides, and the autoscaler what it will need."""

    def __init__(self, scaling_config: Any, job: DecidedJob, decider: ScalingDecider) -> None:
        super().__init__(scaling_config)
        self.job, self.decider = job, decider
        self.control, self.progress = RunControl(job.run), Progress(job.run)
        self.autoscaling = is_autoscaler_v2(fetch_from_server=True)
        self.standbys = StandbyPool(self.control) if job.config.scaling.fast_resize else None
        self._requested = 0
        self._waits_since: float | None = None
        self._step = 0
        """From which the next group goes on."""
        self._since = 0.0
        self._has_run = False
        self._possible = 0
        self._places_known: dict[str, int] = {}
        self._held: Counter[str] = Counter()
        """Workers of each node that the last group holds, or held when it failed."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process of Ray's controller, before that is made."""
        os.environ.update(_CONTROLLER)
        vars(self).update(state)

    def after_controller_start(self, train_run_context: Any) -> None:
        super().after_controller_start(train_run_context)
        if self.standbys:
            self.standbys.adopt_workers()

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Called when the last group is gone; where processes stand by for the next, it is placed on their nodes."""
        self._wait_for_freed_room()
        self._held.clear()
        self.control.train([*self.control.timings, ("teardown", time.time())])
        nodes = set(self.standbys.nodes) if self.standbys and len(self.standbys.nodes) == num_workers else set()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {RAY_NODE_ID_KEY: f"in({','.join(sorted(nodes))})"} if nodes and alive >= nodes else None

    def make_decision_for_non_running_worker_group(self) -> Any:
        if self.control.is_stopped:
            raise RunStoppedError
        if self.standbys:  # those of a change that failed would tie the next group to their nodes
            self.standbys.end()
        self._follow_decisions()
        now, leaving = time.monotonic(), _leaving_nodes()
        if self._waits_since is None:  # nothing is committed while no group is there
            self._waits_since, self._step = now, steps_done(self.job.run)
        step = self._step
        view = ClusterView(now=now, have=0, since=now, done=step, possible=self._possible)
        self._request(self.decider.request(view))
        waited_s = now - self._waits_since
        room = self._room if waited_s < _PLACE_S else self._free  # what killed runs had reserved stays so for minutes
        self._possible = sum(room(self._held, leaving).values())
        size = self.decider.start(step, possible=self._possible, waited_s=waited_s, is_restart=self._has_run)
        if not size:
            time.sleep(_IDLE_S)  # Ray's controller would ask again at once, and take a core
            return NoopDecision()
        self._waits_since, self._since, self._has_run = None, now, True
        return self._resize(size)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        group = worker_group_state
        self._held = Counter(worker.metadata.node_id for worker in group.workers)
        self.progress.update()
        if not self.progress.is_known or self.control.is_stopped:
            return NoopDecision()
        self._follow_decisions()
        view = self._view(group)
        requested = self.decider.request(view)
        # an autoscaler keeps idle nodes for what is asked for; without one, Ray Data must know what this run holds
        lost = view.have - view.staying if requested else 0
        before = self._requested
        self._request(requested + lost or (0 if self.autoscaling else view.have))
        if self._requested > before:  # steps so short that the edge came before the room for it was asked for
            view = self._view(group)
        action = self.decider.decide(view)
        is_ready = self._stand_by(group, view, action)
        if not isinstance(action, ScalingAction):
            return self._resize(action)
        if action is ScalingAction.PAUSE and (is_ready or view.leaving):  # until all is ready, the work goes on
            self.control.pause()
        elif action is ScalingAction.GO_ON:
            self._since = time.monotonic()
            self.progress.went_on()
            self.control.go_on(view.done)
        return NoopDecision()

    def _follow_decisions(self) -> None:
        if self.job.renew():
            self.decider.plan = self.job.config.plan

    def _resize(self, workers: int) -> Any:
        self.progress.forget()
        self.control.train([("decision", time.time())])
        return self._get_resize_decision(workers)

    def _view(self, group: Any) -> ClusterView:
        leaving = _leaving_nodes()
        staying = sum(workers for node, workers in self._held.items() if node not in leaving)
        self._places_known = self._room(self._held, leaving) if self._requested else {}
        return ClusterView(
            now=time.monotonic(),
            have=group.num_workers,
            since=max(self._since, group.start_time),
            done=self.progress.done,
            waits=self.progress.waits,
            step_time_s=self.progress.step_time_s,
            staying=staying,
            possible=max(staying, sum(self._places_known.values())),
            leaving=leaving & self._held.keys(),
        )

    def _stand_by(self, group: Any, view: ClusterView, action: ScalingAction | int) -> bool:
        """Start the processes of the workers that soon follow this group's; whether all that were started are ready."""
        if self.standbys is None:
            return True
        size = self.decider.next_size(view, pauses=action is ScalingAction.PAUSE)
        if size != view.have or view.leaving:
            ours = [worker.metadata.node_id for worker in group.workers if worker.metadata.node_id not in view.leaving]
            more = Counter(self._places_known) - Counter(ours)
            self.standbys.start([*ours, *more.elements()][:size], size, group=group.start_time)
        return self.standbys.is_ready

    # what the cluster has

    def _get_num_workers_for_resource_request(self) -> int:
        return self._requested

    def _request(self, workers: int) -> None:
        """Ask for so many workers' places; at once when that changes, else before Ray forgets it."""
        if workers != self._requested:
            self._requested = workers
            self._send_resource_request()
        self._maybe_send_resource_request()

    def _room(self, ours: Counter[str], leaving: frozenset[str]) -> dict[str, int]:
        """Workers that each node could hold, of those asked for, without what other runs hold."""
        try:
            found = self._reserved()
        except (RayError, GetTimeoutError):
            return {}
        free = self._free(ours, leaving)  # runs that ask for nothing just now have nothing reserved
        places = {node: places for node, places in self._fit(found).items() if node not in leaving}
        return {node: min(count, free.get(node, 0)) for node, count in places.items()}

    def _reserved(self) -> Any:
        """What Ray's coordinator keeps of each node for this run."""
        actor: Any = self._autoscaling_coordinator
        reserved = actor.get_reserved_resources.remote(self._requester_id, recompute=True)  # else up to 20 s old
        return ray.get(reserved, timeout=_CALL_S)

    def _free(self, ours: Counter[str], leaving: frozenset[str]) -> dict[str, int]:
        """Workers that each node could hold beside what others run there, whatever is reserved for whom."""
        free = self._fit(cluster_state.available_resources_per_node())
        return {node: places + ours[node] for node, places in free.items() if node not in leaving}

    def _fit(self, nodes: dict[str, dict[str, float]]) -> dict[str, int]:
        """Workers that fit into these resources of each node."""
        each: Any = {name: need for name, need in self.scaling_config._resources_per_worker_not_none.items() if need}
        return {node: int(min(has.get(one, 0) // each[one] for one in each)) for node, has in nodes.items()}

    def _wait_for_freed_room(self) -> None:
        """Until the cluster knows that the last workers are gone.

        Before that, its autoscaler may add a node for the next ones, and a group that finds no room tries again late.
        """
        deadline = time.monotonic() + _FREE_S
        while time.monotonic() < deadline:
            free = self._free(Counter(), frozenset())
            if all(free.get(node, 0) >= workers for node, workers in self._held.items()):
                return
            time.sleep(0.05)


def _leaving_nodes() -> frozenset[str]:
    """Nodes that have been told to go: spot machines that are taken back, say."""
    return frozenset(cluster_state.get_draining_nodes())


class ScheduledTrainer(TorchTrainer):
    """`TorchTrainer` with this policy."""

    def __init__(self, job: DecidedJob, decider: ScalingDecider, **settings: Any) -> None:
        super().__init__(**settings)
        self.policy = SchedulePolicy(self.scaling_config, job, decider)

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        return super()._initialize_and_run_controller(**{**settings, "scaling_policy": self.policy})
