"""What people see of a run while it trains, from the lines of its record: one line, or a panel on a terminal."""

import math
import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.schedule.time_left import TimeLeft

_BARS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "?"
_WIDTH, _MOST_LOSSES = 32, 4096


class RunView:
    """The state of training: step, losses, speed, kept length, saving, workers, time left."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.plan = config.plan
        self.time = TimeLeft(config.plan, config.scaling.profile)
        self.done = 0
        self.workers: int | None = None
        self.is_paused = self.has_lost = False
        self.state = ""
        """What the run is at, said in the panel."""
        self.saved: tuple[int, float] | None = None
        """The step of the last checkpoint, and its age in seconds."""
        self._is_begun = False
        self._step: dict[str, Any] | None = None
        self._validation: tuple[int, float] | None = None
        self._losses: deque[tuple[int, float]] = deque(maxlen=_MOST_LOSSES)

    def follow(self, config: ExperimentConfig) -> None:
        """Go by a job with more of its kept lengths decided."""
        self.plan = config.plan
        self.time.follow(config.plan)

    @property
    def has_steps(self) -> bool:
        """Whether there is something to be shown."""
        return self._step is not None

    @property
    def share(self) -> float:
        """Of the run, how much is done."""
        return self.done / self.plan.steps

    def take(self, line: dict[str, Any]) -> str:
        """Take in a line of metrics.jsonl; what is to be said of it besides, empty for nothing."""
        if "driver_from" in line:
            self._is_begun = self.is_paused = self.has_lost = False
            return f"start    from step {line['driver_from']}"
        if "lost" in line:
            self.has_lost = True
            return f"lost     a worker: {line['lost']}"
        if "attempt_from" in line:
            return self._begin(line["attempt_from"], line["world_size"])
        if "resize_at" in line:
            self.time.take_pause(line["pause_s"])
            return resize_text(line)
        if "paused_at" in line:
            self.is_paused, self.done = True, line["paused_at"]
            return ""
        if 0 < line["step"] <= self.plan.steps and line["world_size"] > 0:  # else it is damaged
            self._take_step(line)
        return ""

    def _begin(self, step: int, workers: int) -> str:
        is_restart = self._is_begun and not self.is_paused
        self._is_begun, self.has_lost, self.done, self.workers = True, False, step, workers
        while self._losses and self._losses[-1][0] > step:
            self._losses.pop()
        if self._validation and self._validation[0] > step:
            self._validation = None
        who = "1 worker goes" if workers == 1 else f"{workers} workers go"
        return f"restart  a worker was lost; {who} on from step {step}" if is_restart else ""

    def _take_step(self, line: dict[str, Any]) -> None:
        self._is_begun, self.is_paused, self.has_lost = True, False, False
        self._step, self.done, self.workers = line, line["step"], line["world_size"]
        self.time.take(line["step"], step_time_s=line["step_time_s"], workers=line["world_size"])
        self._losses.append((self.done, line["loss"]))
        if line["val_loss"] is not None:
            self._validation = self.done, line["val_loss"]

    def line(self) -> str:
        """All in one line."""
        step, plan = self._last(), self.plan
        parts = [
            f"step {step['step']}/{plan.steps}",
            f"loss {step['loss']:.3f}",
            f"val {self._validation[1]:.3f}" if self._validation else "",
            f"{self._tokens_per_s():,.0f} tok/s",
            f"kept {step['kept_length']}/{plan.shape.sequence_length}",
            f"layer tokens saved {self._saving():.1%}",
            f"ETA {self._left(plan.steps)}",
        ]
        return "  ".join(filter(None, parts))

    def panel(self) -> str:
        """The same and more, in a few lines."""
        step, plan = self._last(), self.plan
        rows = {
            "step": f"{self.done:,} of {plan.steps:,}, {self.share:.0%}; {self._left(plan.steps)} left, by plan",
            "loss": " ".join(filter(None, [f"{step['loss']:.3f}", self._curve()])),
            "held out": "{1:.3f} at step {0:,}".format(*self._validation) if self._validation else "",
            "kept": f"{step['kept_length']} of {plan.shape.sequence_length} tokens;"
            f" {self._saving():.1%} of layer tokens saved",
            "speed": f"{self._tokens_per_s():,.0f} tokens/s",
            "workers": f"{self.workers}{self._next_workers()}",
            "saved": f"step {self.saved[0]:,}, {clock(self.saved[1])} ago" if self.saved else "not yet",
            "state": self.state,
        }
        return "\n".join(f"{name:8}  {text}" for name, text in rows.items() if text)

    def _last(self) -> dict[str, Any]:
        assert self._step is not None
        return self._step

    def _saving(self) -> float:
        step = self._last()
        return 1 - step["layer_tokens"] / (self.plan.layer_tokens_full * step["step"] // self.plan.steps)

    def _tokens_per_s(self) -> float:
        step = self._last()
        took = self.time.step_s(step["step"] - 1, step["world_size"])
        return self.plan.tokens_per_step / took if took else math.nan

    def _left(self, stop: int) -> str:
        return clock(self.time.until(stop, done=self.done) or 0.0)

    def _curve(self) -> str:
        losses = [*self._losses]
        if len(losses) > 2 * _WIDTH:  # beside the fall of the first steps, nothing else would show
            losses = losses[len(losses) // 2 :]
        curve = sparkline([loss for _, loss in losses], _WIDTH)
        return f" {curve} since step {losses[0][0]:,}" if len(curve) > 1 and can_show(curve) else ""

    def _next_workers(self) -> str:
        coming = [one for one in self.plan.resizes if one[0] > self.done or (one[0] == self.done and self.is_paused)]
        return f"; {coming[0][2]} from step {coming[0][0]:,} on, in {self._left(coming[0][0])}" if coming else ""


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of so many characters at most, each of them the mean of as many values; low where values are low."""
    width = min(width, len(values))
    edges = [len(values) * place // width for place in range(width + 1)] if width else []
    parts = [[one for one in values[a:b] if math.isfinite(one)] for a, b in pairwise(edges)]
    means = [math.fsum(one / len(part) for one in part) if part else math.nan for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return _NO_NUMBER * width
    low, high = min(finite), max(finite)
    span = high / 2 - low / 2  # halves, for their difference may be too large
    places = [0.0 if span == 0 or math.isnan(mean) else (mean / 2 - low / 2) / span for mean in means]
    bars = [_BARS[min(len(_BARS) - 1, int(place * len(_BARS)))] for place in places]
    return "".join(_NO_NUMBER if math.isnan(mean) else bar for mean, bar in zip(means, bars, strict=True))


def can_show(text: str) -> bool:
    """Whether the terminal has the characters of a text."""
    terminal = sys.__stderr__  # itself, not what stands for it while something is live there
    try:
        text.encode(terminal.encoding if terminal else "ascii")
    except UnicodeEncodeError:
        return False
    return True


def clock(seconds: float) -> str:
    """75 as 1:15, 4000 as 1:06:40, 100000 as 1 d 3:46:40."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def resize_text(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl on a change of workers: what it took, by the parts that took time."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in line["parts_s"].items() if seconds >= 0.05)
    sizes = f"{line['from']} -> {line['to']}"
    return f"resize   {sizes} workers at step {line['resize_at']}: {line['pause_s']:.1f} s ({parts})"
