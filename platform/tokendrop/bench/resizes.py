"""What changes of workers took in a run that had some, for the planner of workers."""

from dataclasses import replace
from pathlib import Path
from statistics import median

from tokendrop.errors import UserError
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import change_s, step_s
from tokendrop.track.run_folder import open_run_folder, read_attempts


def plan_with_resizes(run: Path) -> RunPlan:
    """The plan of a run whose workers changed.

    Raises:
        UserError: they did not, or this is no run folder.
    """
    config, _ = open_run_folder(run)
    changes = read_attempts(run)[1]
    if not changes:
        raise UserError(f"{run}: want a run whose workers changed; its metrics.jsonl tells of no change")
    plan = config.plan
    for workers in {one[side] for one in changes for side in ("from", "to")}:
        if workers not in plan.batch.world_sizes(workers, workers):
            raise UserError(f"{run}: want a run whose micro batch never changed; {workers} workers do not share it now")
    return plan


def with_resizes(profile: DeviceProfile, plan: RunPlan, run: Path) -> DeviceProfile:
    """A profile by which a resize takes what those of a run took.

    That is the median of what is left of their pauses beside the checkpoint and the first step, which ends a pause.

    Args:
        plan: of that run's model and strategy.
        run: one that `plan_with_resizes` lets pass.
    """
    pauses, free = read_attempts(run)[1], replace(profile, resize_s=0.0)
    rest = [
        one["pause_s"]
        - change_s(plan, free, one["from"], one["to"])
        - step_s(plan, profile, plan.at(one["resize_at"]), one["to"])
        for one in pauses
    ]
    source = f"{profile.source} resize_s then by {len(pauses)} resizes of {run.name}, with what Ray adds."
    return replace(profile, resize_s=max(0.0, median(rest)), source=source)
