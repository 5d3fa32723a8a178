"""Where a run takes place and what it leaves behind."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import Minimised, ScalingObjective, choose_sizes, stretches_s, with_workers

SWEEP = "tokendrop.sweep"
"""The tag of a sweep and its trials, by which MLflow finds them; a trial of several sweeps has all their names."""
_MOST_WORKERS = 100_000
_MOST_S = 1_000_000  # eleven days; clocks of the libraries below count nanoseconds in 64 bits
_LEAD_S, _LEAD_SHARE, _MOST_LEAD_S = 30.0, 0.1, 180.0
_MOST_CORES = 10_000  # of one worker
_MOST_RESTARTS = 1_000_000
_ACCELERATOR = re.compile(r"(?![a-z\d]+$)\w[\w.-]*")  # `h100` would be waited for without end
_LONGEST_MODEL = 250  # letters of the name of a registered model; MLflow takes some more


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersFrom:
    """From a point of the run on, so many workers."""

    from_: Duration
    """In job files `from`: such as `40%` or `1000 steps`."""
    workers: int

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"want workers of at least 1, got {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Workers of the run and what each of them holds."""

    workers: int = 1
    """At every step with `mode: fixed`; else what the plan is compared with."""
    mode: Literal["fixed", "schedule", "fit_per_segment"] = "fixed"
    """schedule: the workers follow the plan within one run of Ray Train; fit_per_segment: one such run a segment."""
    segments: tuple[WorkersFrom, ...] = ()
    """The workers outright, from 0% on; without them they are chosen by `profile`."""
    profile: DeviceProfile | None = None
    """What devices can do: the name of a shipped profile, a file of `tokendrop profile`, or the profile itself."""
    min_workers: int = 1
    max_workers: int | None = None
    """`workers` when left out."""
    lead_s: float | None = None
    """With `mode: schedule`, the nodes of the next workers are asked for so long before these are due; null for as long
    as `lead` finds that they take to come."""
    patience_s: float = 60.0
    """With `mode: schedule`, how long to wait for all nodes that the plan wants before taking what there is."""
    minimise: Minimised = "cost"
    """cost: the fewest GPU-hours within `deadline_hours`; time: the shortest run within a budget."""
    deadline_hours: float | None = None
    """Of training and resizes, start-up left out."""
    budget_gpu_hours: float | None = None
    budget_usd: float | None = None
    """At the profile's `usd_per_gpu_hour`."""
    cpus_per_worker: int = 2
    """CPU cores, and torch threads, of one worker."""
    gpus_per_worker: float = 0
    """GPUs that Ray books for one worker: 0 trains on the CPU, 1 on a GPU, a fraction lets others use the GPU too."""
    accelerator: str | None = None
    """Workers are on nodes with this kind of GPU alone, by Ray's name for it: A100, H100, H200; null for any."""
    market: Literal["spot", "on_demand"] | None = None
    """Workers are on spot nodes alone, or on none that a cloud takes back; null for any. By the resources `market:spot`
    and `market:on_demand` of nodes, as the files in `cluster/` have them."""
    fast_resize: bool = False
    """With `mode: schedule`, the processes of the next workers start while these still train; workers on CPUs only."""
    max_restarts: int = 3
    """How often a lost worker may restart the run from its last checkpoint."""
    peer_timeout_s: float = 120.0
    """A worker that keeps the others waiting longer counts as lost."""

    def __post_init__(self) -> None:
        if self.gpus_per_worker > 1:
            raise ValueError(
                f"want gpus_per_worker of 0 to 1, for a worker trains on one GPU; got {self.gpus_per_worker:g}"
            )
        if not 1 <= self.peer_timeout_s <= _MOST_S:
            raise ValueError(f"want peer_timeout_s from 1 to {_MOST_S:,}, got {self.peer_timeout_s:g}")
        if self.workers < 1 or self.cpus_per_worker < 1 or self.gpus_per_worker < 0 or self.max_restarts < 0:
            raise ValueError(
                "want workers and cpus_per_worker of at least 1, gpus_per_worker and max_restarts of at least 0"
            )
        for key, value, most in (
            ("cpus_per_worker", self.cpus_per_worker, _MOST_CORES),
            ("max_restarts", self.max_restarts, _MOST_RESTARTS),
        ):
            if value > most:
                raise ValueError(f"want {key} of at most {most:,}, got {value:,}")
        if self.accelerator is not None and not _ACCELERATOR.fullmatch(self.accelerator):
            raise ValueError(f"want accelerator as Ray names it, such as H100, got {self.accelerator!r}")
        for key, value in (("lead_s", self.lead_s or 0), ("patience_s", self.patience_s)):
            if not 0 <= value <= _MOST_S:
                raise ValueError(f"want {key} from 0 to {_MOST_S:,}, got {value:g}")
        self._check_elastic()

    def _check_elastic(self) -> None:
        if self.fast_resize and (self.mode != "schedule" or self.gpus_per_worker):
            raise ValueError("fast_resize goes with mode: schedule and gpus_per_worker: 0")
        if self.mode == "schedule" and self.gpus_per_worker not in (0, 1):  # Ray does not tell how shares lie on GPUs
            raise ValueError(f"mode 'schedule' wants gpus_per_worker of 0 or 1, got {self.gpus_per_worker:g}")
        limits = (self.deadline_hours, self.budget_gpu_hours, self.budget_usd)
        bounds = self.min_workers != 1 or self.max_workers is not None
        if self.mode == "fixed" and (self.segments or bounds or any(limits)):
            raise ValueError(
                "mode is 'fixed', so segments, min_workers, max_workers, deadline_hours and budgets would do nothing;"
                " set scaling.mode: schedule"
            )
        if self.mode != "fixed" and not self.segments and self.profile is None:
            raise ValueError(f"mode '{self.mode}' wants segments, or a profile to choose the workers by")
        if self.segments and (bounds or any(limits)):
            raise ValueError("segments give the workers outright; leave out bounds of workers, deadline and budgets")
        if any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError("want deadline_hours, budget_gpu_hours and budget_usd above 0")
        if self.minimise == "cost" and any(limits[1:]):
            raise ValueError("a budget goes with minimise: time; with minimise: cost, give deadline_hours")
        if self.minimise == "time" and self.deadline_hours is not None:
            raise ValueError("deadline_hours goes with minimise: cost; with minimise: time, give a budget")
        if all(limits[1:]) or (self.budget_usd and self.profile and not self.profile.usd_per_gpu_hour):
            raise ValueError(
                "want one budget: budget_gpu_hours, or budget_usd where the profile has a usd_per_gpu_hour"
            )
        least, most = self.min_workers, self.most_workers
        if self.mode != "fixed" and not self.segments and not 1 <= least <= most <= _MOST_WORKERS:
            raise ValueError(f"want 1 <= min_workers <= max_workers <= {_MOST_WORKERS}, got {least} and {most}")

    @property
    def most_workers(self) -> int:
        """The largest number of workers that this run may have."""
        if self.segments:
            return max(segment.workers for segment in self.segments)
        return self.workers if self.max_workers is None else self.max_workers

    def check_groups(self, size: int, *, key: str) -> None:
        """Raises ValueError where workers are not in whole groups of so many, as `train.KEY` says."""
        found = [("workers", self.workers), *(("segments.workers", segment.workers) for segment in self.segments)]
        found += [("max_workers", self.most_workers)]
        found += [("min_workers", self.min_workers)] if self.min_workers > 1 else []
        for name, workers in found:
            if workers % size:
                raise ValueError(f"scaling.{name}: want a multiple of train.{key}={size}, got {workers}")

    def lead(self, plan: RunPlan) -> float:
        """Seconds before workers are due at which their nodes are asked for: `lead_s`, or what nodes take to come.

        That is the profile's `node_start_s`. Where it has none, it is a tenth of the shortest stretch of the run
        between two changes of workers, so that nodes never come long before their work; without a profile, 30 s.
        """
        if self.lead_s is not None:
            return self.lead_s
        if self.profile is None:
            return _LEAD_S
        if self.profile.node_start_s is not None:
            return self.profile.node_start_s
        return min(_MOST_LEAD_S, _LEAD_SHARE * min(stretches_s(plan, self.profile)))

    def apply(
        self, plan: RunPlan, clock: Clock, *, is_begun: bool = False, checkpoint_steps: int | None = None
    ) -> RunPlan:
        """The plan with the workers of each step, as this configuration wants them.

        Args:
            clock: of the run.
            is_begun: whether some of its kept lengths were decided as it trained. Where they leave a limit that can't
                be kept, it is missed by as little as can be: a run is not ended for that.
            checkpoint_steps: between two checkpoints; with them, the profile's losses of nodes have a say.
        Raises:
            ValueError: no workers fit.
        """
        if self.mode == "fixed":
            return plan
        if self.segments or self.profile is None:
            return with_workers(plan, [(round(clock.steps(s.from_)), s.workers) for s in self.segments])
        limit = self.deadline_hours if self.minimise == "cost" else self.budget_gpu_hours
        price = self.profile.usd_per_gpu_hour if self.budget_usd else None
        if self.budget_usd and price:
            limit = self.budget_usd / price
        objective = ScalingObjective(
            min_workers=self.min_workers,
            max_workers=self.most_workers,
            minimise=self.minimise,
            limit=limit,
            usd_per_gpu_hour=price,
            checkpoint_steps=checkpoint_steps,
        )
        try:
            sizes = choose_sizes(plan, self.profile, objective)
        except ValueError:
            if not is_begun or limit is None:
                raise
            limited: Minimised = "time" if self.minimise == "cost" else "cost"
            sizes = choose_sizes(plan, self.profile, replace(objective, minimise=limited, limit=None))
        return with_workers(plan, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved; the last step always is."""

    every: Duration = Duration.parse("10%")
    keep: int = 2
    """Checkpoints kept: the newest ones."""

    def __post_init__(self) -> None:
        if self.every.amount <= 0 or self.keep < 1:
            raise ValueError(f"want every above 0 and keep of at least 1, got {self.every} and {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """MLflow and Prometheus."""

    uri: str | None = "sqlite:///mlflow.db"
    """A tracking URI; null turns tracking off."""
    experiment: str = "tokendrop"
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Of the run in MLflow, beside its own."""
    ranks: bool | None = None
    """Whether each worker exports series of its own to Prometheus; null for as long as there are at most 64 of them."""
    register: str | None = None
    """A name in MLflow's model registry: the model of the finished run, as exported, becomes a version of it."""

    def __post_init__(self) -> None:
        name = self.register
        if name is None:
            return
        if not name.strip() or name in (".", "..") or any(letter in name for letter in "/:"):
            raise ValueError(f"register: want the name of a model, without '/' and ':', got {name!r}")
        if len(name) > _LONGEST_MODEL:
            raise ValueError(f"register: want at most {_LONGEST_MODEL} letters, got {len(name)}")
        if self.uri is None:
            raise ValueError("register: uri is null, so no MLflow to register the model in; leave one of them out")

    @property
    def sweep(self) -> str:
        """The name of the sweep that the run is a trial of; empty where it is none."""
        return self.tags.get(SWEEP, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Validation loss during the run, on the held-out documents, and lm-eval's tasks on its checkpoints; with no token
    dropped."""

    every: Duration = Duration.parse("10%")
    sequences: int = 256
    """Held-out sequences a validation reads, over all workers; fewer where fewer were held out."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, or task files (.yaml), that checkpoints are evaluated on beside training."""
    tasks_every: Duration | None = None
    """The least between two checkpoints that are evaluated; each one when left out. The run's last always is."""
    limit: int | None = None
    """Documents of each task; all when left out."""
    task_data: str | None = None
    """A folder of documents as TASK/SPLIT.jsonl, in the place of what tasks name on the hub."""
    include: str | None = None
    """A folder of task files."""
    log_samples: bool = False
    """Write down each request of the tasks, and what came of it, beside their figures."""
    task_cpus: int = 0
    """Cores that Ray books for the evaluation of tasks, which waits for them. With 0 it waits for nothing, and gets the
    time that workers leave idle."""
    task_gpus: float = 0
    """GPUs that Ray books for it; with 0 it is on the CPU."""

    def __post_init__(self) -> None:
        if self.every.amount <= 0 or self.sequences < 1:
            raise ValueError(f"want every above 0 and sequences of at least 1, got {self.every} and {self.sequences}")
        if self.tasks_every is not None and self.tasks_every.amount <= 0:
            raise ValueError(f"want tasks_every above 0, got {self.tasks_every}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"want limit of at least 1, got {self.limit}")
        if not 0 <= self.task_cpus <= _MOST_CORES or not 0 <= self.task_gpus <= 1:
            raise ValueError(
                f"want task_cpus from 0 to {_MOST_CORES:,} and task_gpus from 0 to 1, got {self.task_cpus} and"
                f" {self.task_gpus:g}"
            )
