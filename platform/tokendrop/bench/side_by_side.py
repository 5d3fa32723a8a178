"""Steps of several jobs in turns, in this process: what `tokendrop compare` says of their time."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from tokendrop.bench.figures import figure, interleave, ratios
from tokendrop.bench.step import timed_step
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.launch.cluster import is_on_this_machine_alone
from tokendrop.launch.memory import fit_at_once
from tokendrop.schedule.plan import RunPlan
from tokendrop.train.device import tune_cpu
from tokendrop.train.worker import build_engine

_LENGTHS = 4  # timed of each job
_FEWEST, _MOST, _SECONDS = 2, 40, 20.0  # turns, as many as fit into so many seconds

Point = tuple[int, float]
"""A kept length, and the steps of the run that it stands for."""


def why_not_timed(configs: Sequence[ExperimentConfig]) -> str | None:
    """Why the steps of these jobs can't be timed in this process as its workers would run them; None where they can."""
    if len(configs) == 1:
        return "there is one job"
    if any(config.scaling.gpus_per_worker for config in configs):
        return "workers are on GPUs"
    if any(segment.workers > 1 for config in configs for segment in config.plan.segments):
        return "there are several workers"
    if len({config.scaling.cpus_per_worker for config in configs}) > 1:
        return "workers have different numbers of cores"
    if not is_on_this_machine_alone():
        return "workers are on a cluster"
    return None if fit_at_once(configs) else "this machine's memory does not hold the models at once"


def time_side_by_side(
    configs: Sequence[ExperimentConfig], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """The time of each job's steps over that of the first job's: a figure over turns of whole steps on random tokens.

    A turn times every job at a few kept lengths of its schedule; every other turn runs backwards.

    Args:
        progress: told the turns done, and those there are.
    """
    tune_cpu(configs[0].scaling.cpus_per_worker)
    points = [timed_points(config.plan) for config in configs]
    jobs = [_steps_of(config) for config in configs]
    cases = {
        _case(job, point): partial(jobs[job], kept_length=points[job][point][0])
        for point in range(_LENGTHS)
        for job in range(len(configs))
        if point < len(points[job])
    }
    begun = time.perf_counter()
    for warm_up in cases.values():
        warm_up()
    turns = min(_MOST, max(_FEWEST, int(_SECONDS / (time.perf_counter() - begun))))
    done = count(1)
    seconds = interleave(cases, rounds=turns, log=lambda _: progress(next(done), turns))
    return [figure(one, "x time") | {"turns": turns} for one in over_first(seconds, points)]


def timed_points(plan: RunPlan, most: int = _LENGTHS) -> list[Point]:
    """The shortest and the longest kept length of a run and some between, with the steps that each stands for.

    Where layers keep different lengths it is their mean, by which their times are told apart.

    A step between two of them counts for both, by its distance: times that grow evenly with the kept length add up to
    those of the run. Where there are few lengths they come more than once, so that no job is timed less than others.
    """
    steps_at = Counter[int]()
    for segment in plan.segments:
        steps_at[segment.kept_length] += segment.stop - segment.start
    lengths = sorted(steps_at)
    some = sorted({lengths[round(number * (len(lengths) - 1) / (most - 1))] for number in range(most)})
    stands_for = dict.fromkeys(some, 0.0)
    for length, steps in steps_at.items():
        above = some[bisect_left(some, length)]
        below = above if above == length else some[bisect_left(some, length) - 1]
        share = 1.0 if above == below else (length - below) / (above - below)
        stands_for[above] += share * steps
        stands_for[below] += (1 - share) * steps
    times = most // len(some)
    return [(length, steps / times) for length, steps in stands_for.items()] * times


def over_first(seconds: Mapping[str, Sequence[float]], points: Sequence[Sequence[Point]]) -> list[list[float]]:
    """For each job, turn by turn, the time of all its steps over that of the first job's.

    Args:
        seconds: of a step of each case, turn by turn.
        points: of each job, those that were timed.
    """
    totals = [
        [
            sum(second * steps for second, (_, steps) in zip(turn, of_job, strict=True))
            for turn in zip(*(seconds[_case(job, point)] for point in range(len(of_job))), strict=True)
        ]
        for job, of_job in enumerate(points)
    ]
    return [ratios(of_job, totals[0]) for of_job in totals]


def _case(job: int, point: int) -> str:
    return f"job {job} point {point}"


def _steps_of(config: ExperimentConfig) -> Callable[..., float]:
    """What runs one step of a job at the kept length that it is given, and returns its seconds."""
    device = torch.device("cpu")
    engine, dropping = build_engine(config, device)
    engine.model.train()
    batch = config.task.build(config).random_batch(config.train.micro_batch, device)
    plan, length = config.plan, config.model.sequence_length
    scores = config.drop.scores(config.model.vocab_size, device)
    by_route = {segment.kept_length: segment.kept_by_route for segment in reversed(plan.segments)}

    def step(kept_length: int) -> float:
        kept = kept_length if dropping is None else by_route[kept_length]
        step: dict[str, Any] = {"kept_length": kept, "sequence_length": length, "scores": scores}
        return timed_step(engine, dropping, batch, **step, micro_batches=plan.batch.accumulation)

    return step
