"""A run whose workers follow its plan within one run of Ray Train; touches what Ray keeps to itself, as `quiet` and
`standby` do.

Ray Train knows how to replace a group of workers by one of another size, but not when: its own policy grows whenever it
can. Here it is told by `Follower`. Checked with Ray 2.60, whose names a test holds this file to.
"""

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray._raylet import RAY_NODE_ID_KEY  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import GetTimeoutError, RayError
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision
from ray.train.v2._internal.execution.worker_group.worker import Worker

from tokendrop.launch.following import Act, Follower, View
from tokendrop.launch.orders import Standing, go_on, pause, standing
from tokendrop.launch.quiet import QuietController, QuietTorchTrainer
from tokendrop.launch.standby import (
    PLACE_S,
    Marks,
    PlanWorkerGroup,
    begin_marks,
    end_standbys,
    mark,
    standby_nodes,
    start_standbys,
)
from tokendrop.train.committed import committed_step

_CALL_S = 5.0  # for a worker's answer
_IDLE_S = 0.25  # between two looks at a cluster whose nodes are waited for
_FREE_S = 1.5  # for a cluster to notice that workers are gone
_POLL_S, _POLL_NEAR_S, _NEAR_S = 1.0, 0.1, 5.0  # how often workers are looked at, and how often before they change
_WARM_S = 30.0  # so long before workers change, the processes of the next ones start


class PlanPolicy(ElasticScalingPolicy):
    """Tells Ray Train what a `Follower` decides, and the autoscaler what it will need."""

    def __init__(self, scaling_config: Any, follower: Follower, checkpoints: Path, *, autoscaling: bool) -> None:
        super().__init__(scaling_config)
        self.follower, self.checkpoints, self.autoscaling = follower, checkpoints, autoscaling
        self.poll_s = _POLL_S
        self._asked = 0
        self._waits_since: float | None = None
        self._since = 0.0
        self._has_run = False
        self._possible = 0
        self._places_known: dict[str, int] = {}
        self._warmed: tuple[float, int] | None = None
        self._warming: list[Any] = []

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Where the processes for so many workers stand by, these are to be placed there."""
        nodes = standby_nodes()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if len(nodes) != num_workers or not alive.issuperset(nodes):
            return None
        return {RAY_NODE_ID_KEY: f"in({','.join(sorted(set(nodes)))})"}

    def _get_num_workers_for_resource_request(self) -> int:
        return self._asked

    def _request(self, workers: int) -> None:
        """Ask for so many workers' places; at once when that changes, else before Ray forgets it."""
        if workers != self._asked:
            self._asked = workers
            self._send_resource_request()
        self._maybe_send_resource_request()

    def _places(self, leaving: frozenset[str]) -> dict[str, int]:
        """Workers that each node could hold, of those asked for; the nodes that will go away left out."""
        actor: Any = self._autoscaling_coordinator
        reserved = actor.get_reserved_resources.remote(self._requester_id, recompute=True)  # else up to 20 s old
        try:
            found: Any = ray.get(reserved, timeout=_CALL_S)
        except (RayError, GetTimeoutError):
            return {}
        return {node: places for node, places in self._fit(found).items() if node not in leaving}

    def _room(self, ours: Counter[str], leaving: frozenset[str]) -> dict[str, int]:
        """As `_places`, without what other runs hold: those that ask for nothing just now have nothing reserved."""
        free = self._free(ours, leaving)
        return {node: min(places, free.get(node, 0)) for node, places in self._places(leaving).items()}

    def _free(self, ours: Counter[str], leaving: frozenset[str]) -> dict[str, int]:
        """Workers that each node could hold beside what others run there, whatever is reserved for whom."""
        free = self._fit(cluster_state.available_resources_per_node())
        return {node: places + ours[node] for node, places in free.items() if node not in leaving}

    def _fit(self, nodes: dict[str, dict[str, float]]) -> dict[str, int]:
        """Workers that fit into these resources of each node."""
        each: Any = {name: need for name, need in self.scaling_config._resources_per_worker_not_none.items() if need}
        return {node: int(min(has.get(one, 0) // each[one] for one in each)) for node, has in nodes.items()}

    def make_decision_for_non_running_worker_group(self) -> Any:
        end_standbys()  # of a change that came to nothing: they would tie the next try to their nodes
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        step, leaving = committed_step(self.checkpoints), _leaving_nodes()
        self._request(self.follower.request(View(now=now, have=0, since=now, done=step, possible=self._possible)))
        waited_s = now - self._waits_since
        room = self._room if waited_s < PLACE_S else self._free  # what killed runs had reserved stays so for minutes
        self._possible = sum(room(Counter(), leaving).values())
        size = self.follower.start(step, possible=self._possible, waited_s=waited_s, is_restart=self._has_run)
        if not size:
            return NoopDecision()
        self._waits_since, self._since, self._has_run, self.poll_s = None, now, True, _POLL_NEAR_S
        return self._get_resize_decision(size)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        group = worker_group_state
        stands = _ask(group.workers[0])
        if stands is None:
            return NoopDecision()
        view = self._view(group, stands)
        asked = self.follower.request(view)
        # an autoscaler books what is asked for on idle nodes, and so keeps them; Ray Data leaves it to us elsewhere
        lost = view.have - view.staying if asked else 0
        before = self._asked
        self._request(asked + lost or (0 if self.autoscaling else view.have))
        if self._asked > before:  # steps so short that the edge came before the room for it was asked for
            view = self._view(group, stands)
        act = self.follower.decide(view)
        is_near = act is not Act.STAY or self.follower.next_change(view)[1] < _NEAR_S
        self.poll_s = _POLL_NEAR_S if is_near else _POLL_S
        # only a worker that Ray gives GPUs knows which are its own: there, nothing stands by
        is_ready = stands.device != "cpu" or self._stand_by(group, view, act)
        if not isinstance(act, Act):
            return self._get_resize_decision(act)
        if act is not Act.PAUSE or is_ready or view.leaving:  # else the work goes on until all is ready
            self._tell(group, act, view.done)
        return NoopDecision()

    def _view(self, group: Any, stands: Standing) -> View:
        leaving = _leaving_nodes()
        ours = Counter(worker.metadata.node_id for worker in group.workers)
        staying = sum(n for node, n in ours.items() if node not in leaving)
        self._places_known = self._room(ours, leaving) if self._asked else {}
        possible = max(staying, sum(self._places_known.values()))
        return View(
            now=time.monotonic(),
            have=group.num_workers,
            since=max(self._since, group.start_time),
            done=stands.done,
            waits=stands.waits,
            step_time_s=stands.step_time_s,
            staying=staying,
            possible=possible,
            leaving=leaving & ours.keys(),
        )

    def _stand_by(self, group: Any, view: View, act: Act | int) -> bool:
        """Start the processes of the workers that soon follow this group's; whether all that were started are ready."""
        soon, in_s = self.follower.next_change(view)
        size = self.follower.want(view) if act is Act.PAUSE else soon if in_s <= _WARM_S else view.have
        if (group.start_time, size) != self._warmed and (size != view.have or view.leaving):
            homes = self._homes(group, view, size)
            if len(homes) == size:
                self._warmed = group.start_time, size
                self._warming = start_standbys(homes)
        return not self._warming or not ray.wait(self._warming, num_returns=len(self._warming), timeout=0)[1]

    def _homes(self, group: Any, view: View, size: int) -> list[str]:
        """Nodes of the next workers: those of this group first."""
        ours = [worker.metadata.node_id for worker in group.workers if worker.metadata.node_id not in view.leaving]
        more = Counter(self._places_known) - Counter(ours)
        return [*ours, *more.elements()][:size]

    def _tell(self, group: Any, act: Act, step: int) -> None:
        if act is Act.PAUSE:  # one is enough: the workers agree on it at each step
            group.workers[0].execute_async(pause)
        elif act is Act.GO_ON:
            self._since = time.monotonic()
            with contextlib.suppress(RayError, GetTimeoutError):  # one that died is found by the next poll
                ray.get([worker.execute_async(go_on, step) for worker in group.workers], timeout=_CALL_S)


def _ask(worker: Worker) -> Standing | None:
    """Where a worker stands; None where it does not answer yet, or any more."""
    answer: Any = worker.execute_async(standing)
    try:
        return ray.get(answer, timeout=_CALL_S)
    except (RayError, GetTimeoutError):
        return None


def _leaving_nodes() -> frozenset[str]:
    """Nodes that have been told to go: spot machines that are taken back, say."""
    return frozenset(cluster_state.get_draining_nodes())


class PlanController(QuietController):
    """Takes note of times, and leaves the processor alone while it waits for nodes: Ray's own takes a whole core."""

    worker_group_cls = PlanWorkerGroup
    _scaling_policy: PlanPolicy

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        """Ray's own lets a group that has failed keep its room until a next one is decided on: in that very room."""
        if self._worker_group:
            self._shutdown_worker_group()
        return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)

    async def _run_control_loop_iteration(self) -> None:
        before = self.get_state()
        self._health_check_interval_s = self._scaling_policy.poll_s
        await super()._run_control_loop_iteration()
        if self.get_state() is before:
            await asyncio.sleep(_IDLE_S)

    def _execute_resize_decision(self, decision: Any) -> Any:
        begin_marks()
        return super()._execute_resize_decision(decision)

    def _shutdown_worker_group(self) -> None:
        before: Any = ray.available_resources().get("CPU", 0)
        super()._shutdown_worker_group()
        # until the cluster knows that the old workers are gone, its autoscaler may add a node for the new ones
        deadline = time.monotonic() + (_FREE_S if self._scaling_policy.autoscaling else 0)
        while time.monotonic() < deadline and ray.available_resources().get("CPU", 0) <= before:
            time.sleep(0.05)
        mark("teardown")


class PlanTrainer(QuietTorchTrainer):
    """TorchTrainer that follows a plan of workers; the training function runs under `Orders`."""

    def __init__(self, *, follower: Follower, checkpoints: Path, autoscaling: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.policy = PlanPolicy(self.scaling_config, follower, checkpoints, autoscaling=autoscaling)

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        settings["scaling_policy"] = self.policy
        settings["callbacks"] = [*settings["callbacks"], Marks()]
        try:
            return PlanController(**settings).run_to_the_end()
        finally:
            end_standbys()
