"""What a run that follows its plan decides, on clusters that give and take as they like."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tiny import experiment
from tokendrop.elastic.decide import ClusterView, ScalingAction, ScalingDecider
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import with_workers

SIZES = (1, 2, 4, 8)
STEPS, LEAD_S, PATIENCE_S = 40, 6.0, 5.0

edges = st.lists(st.integers(1, STEPS - 1), unique=True, max_size=4).map(sorted)
plans = edges.flatmap(
    lambda starts: st.tuples(
        st.just([0, *starts]), st.lists(st.sampled_from(SIZES), min_size=len(starts) + 1, max_size=len(starts) + 1)
    )
)


def plan_of(starts: list[int], workers: list[int]) -> RunPlan:
    config = experiment(train__length=f"{STEPS} steps", train__micro_batch=1)
    return with_workers(config.plan, list(zip(starts, workers, strict=True)))


def decider_of(plan: tuple[list[int], list[int]]) -> ScalingDecider:
    return ScalingDecider(plan=plan_of(*plan), sizes=SIZES, lead_s=LEAD_S, patience_s=PATIENCE_S)


def simulate(decider: ScalingDecider, rooms: list[int]) -> list[tuple[int, int, list[ScalingAction | int]]]:
    """A step takes a second; in that of step i the cluster has room for `rooms[i]` more than none.

    Returns:
        For each step its number, the workers that did it, and what was decided before it.
    """
    now, step, since, have, paused, log = 0.0, 0, 0.0, 0, False, []
    while step < decider.plan.steps:
        room = rooms[step % len(rooms)]
        if not have:
            have = decider.start(step, possible=room, waited_s=now - since, is_restart=step > 0)
            now, since = now + 1, now if have else since
            continue
        decisions: list[ScalingAction | int] = []
        waits = paused or step in {start for start, _, _ in decider.plan.resizes}
        while True:
            view = ClusterView(
                now=now, have=have, since=since, done=step, waits=waits, possible=max(room, have), step_time_s=1.0
            )
            decisions.append(act := decider.decide(view))
            if isinstance(act, ScalingAction):
                break
            assert waits
            assert act in SIZES
            have, since, waits = act, now, False
        if act is ScalingAction.GO_ON:
            since = now
        paused = act is ScalingAction.PAUSE
        log.append((step, have, decisions))
        now, step = now + 1, step + 1
    return log


@given(plans)
def test_with_room_for_all_every_step_has_the_planned_workers_and_nothing_pauses_beside_the_plan(plan) -> None:
    decider = decider_of(plan)
    for step, have, decisions in simulate(decider, [8]):
        assert have == decider.plan.at(step).workers
        assert ScalingAction.PAUSE not in decisions


@given(plans, st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_whatever_there_is_room_for_workers_are_never_more_than_planned_or_possible(plan, rooms: list[int]) -> None:
    decider = decider_of(plan)
    most = 0
    for step, have, _ in simulate(decider, rooms):
        most = max(most, decider.fit(rooms[step % len(rooms)]))
        assert have in SIZES
        assert have <= decider.plan.at(step).workers
        assert have <= max(most, 1)


@given(st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_room_that_comes_is_taken(little: int, much: int) -> None:
    decider = decider_of(([0], [8]))
    rooms = [little] * 10 + [max(little, much)] * 30
    log = simulate(decider, rooms)
    assert log[-1][1] == decider.fit(max(little, much))


@given(st.integers(0, STEPS - 1), st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 40))
def test_asked_for_is_what_the_plan_wants_now_or_soon_and_nothing_where_it_is_there(
    done: int, before: int, after: int, waited: int
) -> None:
    decider = decider_of(([0, 20], [before, after]))
    view = ClusterView(now=0.0, have=before, since=0.0, done=done, step_time_s=1.0, possible=before)
    wanted = max(decider.target(done), after if done + LEAD_S >= 20 else 0)
    first = decider.request(view)
    assert first == (wanted if wanted > before else 0)
    later = decider.request(replace(view, now=float(waited)))
    assert (later == 0) == (first == 0)
    assert later <= wanted
    assert decider.request(replace(view, now=float(waited), possible=8)) == first


def test_what_was_asked_for_ahead_is_not_given_up_where_steps_slow_down() -> None:
    decider = decider_of(([0, 20], [1, 4]))
    view = ClusterView(now=0.0, have=1, since=0.0, done=15, step_time_s=1.0, possible=1)
    assert decider.request(view) == 4
    assert decider.request(replace(view, step_time_s=5.0, possible=4)) == 4


@given(st.sampled_from(SIZES), st.integers(0, 8))
def test_off_nodes_that_leave_as_soon_as_the_state_is_saved(have: int, room: int) -> None:
    decider = decider_of(([0], [have]))
    leaving = ClusterView(
        now=0.0, have=have, since=0.0, done=3, step_time_s=1.0, possible=room, leaving=frozenset({"node"})
    )
    assert decider.decide(leaving) is ScalingAction.PAUSE
    waiting = replace(leaving, done=4, waits=True)
    if room:
        assert decider.decide(waiting) == decider.fit(min(have, room))
    else:  # nowhere to go: the work goes on while the node is there, and is saved no second time
        assert decider.decide(waiting) is ScalingAction.GO_ON
        assert decider.decide(replace(leaving, done=5)) is ScalingAction.STAY
