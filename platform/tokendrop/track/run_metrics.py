"""What Prometheus is told of a run that goes on, from the lines of its live record.

Names are those of MLflow where it has the metric too. There are at most `MOST_SERIES` series of a run, whatever its
task measures and however its workers start.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.schedule.scaling import Expected, expected_course
from tokendrop.track.mlflow import FIGURES, METRICS

MOST_SERIES = 60
_MOST_FIGURES, _MOST_PARTS = 10, 10
_SMOOTH, _HOUR_S = 0.9, 3600.0

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric, and its tags beside those of the run: names and values."""

ABOUT = {
    "loss/train": "Mean training loss of the last step, nats per token.",
    "loss/validation": "Loss on the held-out rows, no token dropped, at the last validation.",
    "progress/step": "Optimizer steps done.",
    "progress/steps": "Optimizer steps of the plan.",
    "progress/tokens": "Tokens consumed so far.",
    "progress/layer_tokens": "Layer tokens consumed so far.",
    "progress/layer_token_saving": "Share of layer tokens saved so far, over all layers.",
    "progress/flops": "FLOPs spent so far, by the plan's count.",
    "schedule/kept_length": "Tokens of a sequence that a dropped layer sees.",
    "schedule/learning_rate": "Learning rate of the last step.",
    "schedule/world_size": "Workers that did the last step.",
    "schedule/planned_workers": "Workers that the plan has for the next step.",
    "speed/step_time_s": "Seconds of the last step, validation left out.",
    "speed/data_time_s": "Seconds of the last step that rank 0 waited for data.",
    "speed/tokens_per_s": "Tokens per second over the last steps, all workers together.",
    "speed/flops_per_s": "FLOP/s over the last steps by the plan's count, all workers together.",
    "training/grad_norm": "Gradient norm of the last step, before clipping.",
    "time/steps_s": "Seconds spent in steps since this driver began.",
    "time/data_s": "Seconds of them that rank 0 waited for data.",
    "time/pauses_s": "Seconds that changes of workers took since this driver began.",
    "time/since_step_s": "Seconds since the last step; left out when training is over.",
    "events/resizes": "Changes of workers by plan since this driver began.",
    "events/restarts": "Restarts from a checkpoint since this driver began.",
    "events/lost": "Failures of workers since this driver began.",
    "resize/part_s": "Seconds that a part of the changes of workers took since this driver began.",
    "plan/behind_s": "Seconds that this driver's steps have taken beyond what the profile says; below 0 ahead of it.",
    "cost/worker_hours": "Worker-hours of steps and of changes of workers since this driver began.",
    "cost/planned_worker_hours": "Worker-hours of the same steps by the profile.",
    "cost/usd": "Those worker-hours at the profile's price.",
    "cost/planned_usd": "The planned worker-hours at the profile's price.",
    "checkpoint/step": "Steps done by the newest committed checkpoint.",
    "checkpoint/age_s": "Seconds since it was committed.",
    "disk/free_bytes": "Free bytes where the run folder lies.",
    "disk/size_bytes": "Bytes that fit there.",
}
"""What each metric is, but for figures of a task, which are `quality/NAME` as in MLflow."""


class RunMetrics:
    """The last value of each metric of a run, and sums since its driver began."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.task, self.profile = config.task, config.scaling.profile
        self._begun = self._stepped = time.time()
        self._last: Mapping[str, Any] | None = None
        self._first_step: int | None = None
        self._step_time_s: float | None = None
        self._validated: dict[str, float] = {}
        self._sums = dict.fromkeys(("steps", "data", "pauses", "workers"), 0.0)
        self._events = dict.fromkeys(("resizes", "restarts", "lost"), 0)
        self._parts: dict[str, float] = {}
        self._attempts, self._is_paused = 0, False
        self._course: list[Expected] = []
        self.follow(config)

    def follow(self, config: ExperimentConfig) -> None:
        """Go by a job with more of its kept lengths decided."""
        self.plan = config.plan
        if self.profile is not None:
            self._course = expected_course(self.plan, self.profile)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        if "step" in line:
            self._take_step(line)
        elif "lost" in line:
            self._events["lost"] += 1
        elif "attempt_from" in line:
            self._attempts += 1
            self._events["restarts"] += self._attempts > 1 and not self._is_paused
            if self._first_step is None:
                self._first_step = int(line["attempt_from"])
        elif "resize_at" in line:
            self._take_resize(line)
        elif "paused_at" in line:
            self._is_paused = True

    def _take_step(self, line: Mapping[str, Any]) -> None:
        took = line["step_time_s"]
        self._last, self._stepped, self._is_paused = line, line.get("time", self._begun), False
        if self._first_step is None:
            self._first_step = line["step"] - 1
        before = took if self._step_time_s is None else self._step_time_s
        self._step_time_s = _SMOOTH * before + (1 - _SMOOTH) * took
        self._sums["steps"] += took
        self._sums["data"] += line["data_time_s"]
        self._sums["workers"] += took * line["world_size"]
        if line["val_loss"] is not None:
            figures = self.task.figures(line["val_loss"], line.get("val_figures") or {})
            some = {f"{FIGURES}/{name}": figures[name] for name in sorted(figures)[:_MOST_FIGURES]}
            self._validated = {**some, "loss/validation": line["val_loss"]}

    def _take_resize(self, line: Mapping[str, Any]) -> None:
        self._events["resizes"] += 1
        self._sums["pauses"] += line["pause_s"]
        self._sums["workers"] += line["pause_s"] * max(line["from"], line["to"])
        for name, seconds in line["parts_s"].items():
            known = name in self._parts or len(self._parts) < _MOST_PARTS - 1
            part = name if known else "other"
            self._parts[part] = self._parts.get(part, 0.0) + seconds

    def values(self, now: float) -> dict[Series, float]:
        """What is known by now, a time in seconds since 1970."""
        found = self._of_last_step() | self._validated
        done = (self._first_step or 0) if self._last is None else int(self._last["step"])
        found |= {"progress/step": done, "progress/steps": self.plan.steps}
        found |= {f"time/{name}_s": self._sums[name] for name in ("steps", "data", "pauses")}
        found |= {f"events/{name}": count for name, count in self._events.items()}
        if done < self.plan.steps:
            found["time/since_step_s"] = max(0.0, now - self._stepped)
            found["schedule/planned_workers"] = self.plan.at(done).workers
        found |= self._cost(done, now)
        parts = {("resize/part_s", (("part", name),)): seconds for name, seconds in self._parts.items()}
        return {(name, ()): float(value) for name, value in found.items()} | parts

    def _of_last_step(self) -> dict[str, float]:
        line, plan = self._last, self.plan
        if line is None:
            return {}
        found = {name: line[field] for name, field in METRICS.items() if line[field] is not None}
        step, full = line["step"], plan.layer_tokens_full / plan.steps
        found["progress/layer_token_saving"] = 1 - line["layer_tokens"] / (full * step)
        if self._step_time_s:
            found["speed/tokens_per_s"] = plan.tokens_per_step / self._step_time_s
            found["speed/flops_per_s"] = plan.at(min(step, plan.steps) - 1).flops_per_step / self._step_time_s
        return found

    def _cost(self, done: int, now: float) -> dict[str, float]:
        """Worker-hours so far and, with a profile, what they should have been."""
        hours = self._sums["workers"] / _HOUR_S
        found = {"cost/worker_hours": hours}
        if self.profile is None or self._first_step is None:
            return found
        planned, before = self._expected(done), self._expected(min(done, self._first_step))
        planned_hours = (planned.worker_s - before.worker_s) / _HOUR_S
        found["cost/planned_worker_hours"] = planned_hours
        until = now if done < self.plan.steps else self._stepped
        found["plan/behind_s"] = until - self._begun - (planned.wall_clock_s - before.wall_clock_s)
        if price := self.profile.usd_per_gpu_hour:
            found |= {"cost/usd": hours * price, "cost/planned_usd": planned_hours * price}
        return found

    def _expected(self, step: int) -> Expected:
        """What the plan takes until `step` steps are done."""
        return self._course[bisect_right(self._course, step, key=lambda one: one.step) - 1].at(step)
