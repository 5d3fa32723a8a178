"""`tokendrop plan --simulate`: whole runs with nodes lost at random, by what their workers do about it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, quantiles
from typing import Any

from tokendrop.cli.arguments import add_job, whole
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.output import decimals, table
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import ScalingObjective, legal_sizes, with_workers
from tokendrop.schedule.simulate import SimulatedRun, Simulation

_MOST = 100_000  # simulated runs
_SHARES = (5, 50, 95)
_FIGURES = {"wall_clock_s": ("hours", 3600), "gpu_hours": ("GPU-hours", 1), "cost": ("USD", 1)}
_MEANS = {"useful_gpu_hours": "GPU-hours of steps that last", "losses": "nodes lost", "steps_again": "steps done again"}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What simulations add to a plan: to the one that scripts read, and to the one that people do."""

    result: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `plan`."""
    add_job(parser)
    parser.add_argument(
        "--simulate", type=whole(2, _MOST), metavar="N", help="simulate N runs with losses of nodes, as the profile has"
    )
    parser.add_argument("--seed", type=whole(0), help="of the simulated losses, 0 by default")


def run(config: ExperimentConfig, simulations: int | None, seed: int | None) -> Simulated:
    """Simulate a job's plan; nothing where `simulations` is None.

    Raises:
        UserError: the job has no profile, or that no losses.
    """
    if simulations is None:
        if seed is not None:
            raise UserError("--seed: it is that of --simulate; want both, or neither")
        return Simulated()
    profile = _profile(config)
    runs = {name: _runs(simulation, simulations, seed or 0) for name, simulation in policies(config, profile).items()}
    figures = {name: _figures(some, profile.usd_per_gpu_hour) for name, some in runs.items()}
    result = {"simulations": simulations, "seed": seed or 0, "policies": figures}
    return Simulated({"simulated": result}, _text(figures, simulations, seed or 0, profile))


def policies(config: ExperimentConfig, profile: DeviceProfile) -> dict[str, Simulation]:
    """What may be done about losses: wait, as `mode: fixed` does; follow the plan, as `mode: schedule` does; or take as
    many workers as there are up to `scaling.max_workers`, whatever the kept length, as elastic training does that knows
    no schedule."""
    scaling, fixed = config.scaling, config.fixed_plan
    bounds = ScalingObjective(
        min_workers=scaling.min_workers, max_workers=scaling.most_workers, minimise=scaling.minimise
    )
    sizes = legal_sizes(fixed, bounds)

    def simulation(plan: RunPlan, *, waits: bool = False) -> Simulation:
        return Simulation(
            plan=plan,
            profile=profile,
            sizes=sizes,
            checkpoint_steps=config.checkpoint_steps,
            waits=waits,
            patience_s=scaling.patience_s,
        )

    return {
        "fixed": simulation(fixed, waits=True),
        "schedule": simulation(config.plan),
        "availability": simulation(with_workers(fixed, [(0, sizes[-1])])),
    }


def _profile(config: ExperimentConfig) -> DeviceProfile:
    profile = config.scaling.profile
    if profile is None:
        raise UserError("--simulate: want scaling.profile, a device profile with node_losses_per_hour")
    if not profile.node_losses_per_hour:
        raise UserError(
            f"--simulate: '{profile.name}' has no losses of nodes; want scaling.profile.node_losses_per_hour above 0"
        )
    if profile.node_start_s is None:
        raise UserError(f"--simulate: '{profile.name}' does not say scaling.profile.node_start_s; want these seconds")
    return profile


def _runs(simulation: Simulation, simulations: int, seed: int) -> list[SimulatedRun]:
    """The same losses for each policy, in terms of the hours for which nodes are held."""
    try:
        return [simulation.run(Random(f"{seed} {number}")) for number in range(simulations)]
    except ValueError as error:
        raise UserError(f"--simulate: {error}") from None


def _figures(runs: Sequence[SimulatedRun], price: float | None) -> dict[str, Any]:
    values = {
        "wall_clock_s": [run.wall_clock_s for run in runs],
        "gpu_hours": [run.gpu_hours for run in runs],
        "cost": None if price is None else [price * run.gpu_hours for run in runs],
    }
    means = {key: fmean(getattr(run, key) for run in runs) for key in _MEANS}
    return {key: _spread(some) for key, some in values.items() if some is not None} | means


def _spread(values: Sequence[float]) -> dict[str, float]:
    percentiles = quantiles(values, n=100, method="inclusive")
    return {"mean": fmean(values), **{f"p{share}": percentiles[share - 1] for share in _SHARES}}


def _text(figures: Mapping[str, Mapping[str, Any]], simulations: int, seed: int, profile: DeviceProfile) -> str:
    columns = ["mean", *(f"p{share}" for share in _SHARES)]
    rows: list[list[str]] = []
    for key, (title, unit) in _FIGURES.items():
        for name, some in figures.items():
            if key in some:
                rows.append([f"{title}, {name}", *(decimals(some[key][column] / unit) for column in columns)])
    for key, title in _MEANS.items():
        rows += [[f"{title}, {name}", decimals(some[key]), "", "", ""] for name, some in figures.items()]
    said = (
        f"{simulations:,} simulated runs, seed {seed}: a node is lost {profile.node_losses_per_hour:g} times an hour,"
        f" and {profile.node_start_s:g} s later another one is there."
    )
    return f"\n\n{said}\n\n" + table(["", *columns], rows)
