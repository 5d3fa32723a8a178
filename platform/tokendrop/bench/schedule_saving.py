"""What a job's schedule of kept lengths saves, by any cost of a step that is known at some of them."""

from collections.abc import Callable, Mapping, Sequence

from tokendrop.bench.figures import figure
from tokendrop.schedule.device import interpolate
from tokendrop.schedule.plan import RunPlan


def saving_over(plan: RunPlan, cost: Callable[[int], float]) -> float:
    """Share of what all steps would cost at full length that the plan saves.

    Args:
        cost: of one step, by its kept length.
    """
    full = plan.steps * cost(plan.shape.sequence_length)
    return 1 - sum((s.stop - s.start) * cost(s.kept_length) for s in plan.segments) / full


def schedule_figures(
    plan: RunPlan, seconds: Mapping[int, Sequence[float]], plain_seconds: Sequence[float]
) -> dict[str, object]:
    """What the plan saves of the FLOPs and of the measured time, over its whole run.

    Args:
        seconds: of a step, round by round, by its kept length; between these lengths times are taken to lie on lines.
        plain_seconds: of a step of the plain model, in the same rounds.
    """
    layers = len(plan.dropped_layers)
    theoretical = saving_over(plan, lambda kept: plan.shape.flops(kept=kept, dropped_layers=layers))
    realised: list[float] = []
    against_plain: list[float] = []
    for number, plain in enumerate(plain_seconds):
        points = [(float(kept), of_rounds[number]) for kept, of_rounds in seconds.items()]
        saved = saving_over(plan, lambda kept, points=points: interpolate(kept, points))
        realised.append(saved)
        against_plain.append(1 - (1 - saved) * interpolate(plan.shape.sequence_length, points) / plain)
    return {
        "kept_lengths": [plan.segments[0].kept_length, plan.segments[-1].kept_length],
        "segments": len(plan.segments),
        "theoretical_saving": theoretical,
        "realised_saving": figure(realised, "of the time"),
        "realised_over_theoretical": figure([saved / theoretical for saved in realised], "x"),
        "realised_saving_against_plain": figure(against_plain, "of the time"),
    }
