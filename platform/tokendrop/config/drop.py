"""Which layers drop tokens, and how many they keep when."""

from dataclasses import dataclass
from typing import Literal

from tokendrop.schedule.duration import Duration
from tokendrop.schedule.kept_length import Constant, KeptLengthSchedule, Mslg, Piecewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What turns durations into steps."""

    sequence_length: int
    tokens_per_step: int
    total_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MslgConfig:
    """Monotonic sequence length growth, as the paper writes it: `increment` more tokens every so often."""

    kind: Literal["mslg"] = "mslg"
    start: int
    increment: int
    every: Duration
    """Between jumps, such as `1.75e9 tokens` or `350 steps`."""
    full: int | None = None
    """Kept length where the growth ends; the sequence length when left out."""

    def build(self, clock: Clock) -> KeptLengthSchedule:
        interval = self.every.steps(tokens_per_step=clock.tokens_per_step, total_steps=clock.total_steps)
        full = clock.sequence_length if self.full is None else self.full
        return Mslg(start=self.start, full=full, increment=self.increment, interval=interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Growth in equal jumps that reaches the full length at `until`, such as `70%` of the run."""

    kind: Literal["linear"] = "linear"
    start: int
    until: Duration
    increment: int = 16

    def build(self, clock: Clock) -> KeptLengthSchedule:
        steps = self.until.steps(tokens_per_step=clock.tokens_per_step, total_steps=clock.total_steps)
        return Mslg.until(start=self.start, full=clock.sequence_length, increment=self.increment, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantConfig:
    """One kept length for the whole run."""

    kind: Literal["constant"] = "constant"
    kept: int

    def build(self, clock: Clock) -> KeptLengthSchedule:
        return Constant(kept=self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """Nothing is dropped."""

    kind: Literal["full"] = "full"

    def build(self, clock: Clock) -> KeptLengthSchedule:
        return Constant(kept=clock.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From `at` on, keep `kept` tokens."""

    at: Duration
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseConfig:
    """Kept lengths given outright, stage by stage."""

    kind: Literal["piecewise"] = "piecewise"
    stages: tuple[Stage, ...]

    def build(self, clock: Clock) -> KeptLengthSchedule:
        def step(stage: Stage) -> int:
            steps = stage.at.steps(tokens_per_step=clock.tokens_per_step, total_steps=clock.total_steps)
            return round(steps)

        return Piecewise(stages=tuple((step(stage), stage.kept) for stage in self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConfig:
    """The method and its schedule."""

    method: Literal["none", "random_ltd"] = "none"
    schedule: MslgConfig | LinearConfig | ConstantConfig | FullConfig | PiecewiseConfig = FullConfig()
    whole_layers: Literal["none", "first", "last", "first_and_last"] | tuple[int, ...] = "first_and_last"
    """Layers that see every token: by name, or by number from 0 (from the end when negative)."""

    def __post_init__(self) -> None:
        if self.method == "none" and not isinstance(self.schedule, FullConfig):
            raise ValueError("method is 'none', so this schedule would do nothing; set drop.method: random_ltd")

    def whole_layer_numbers(self) -> tuple[int, ...]:
        """The layers left whole, numbered from 0, or from the end when negative."""
        if isinstance(self.whole_layers, tuple):
            return self.whole_layers
        return {"none": (), "first": (0,), "last": (-1,), "first_and_last": (0, -1)}[self.whole_layers]

    def dropped_layers(self, layers: int) -> tuple[int, ...]:
        """Numbers, from 0, of the layers that see only the kept tokens."""
        if self.method == "none":
            return ()
        whole = self.whole_layer_numbers()
        if not all(-layers <= number < layers for number in whole):
            raise ValueError(f"drop.whole_layers: want numbers of {layers} layers, got {list(whole)}")
        return tuple(layer for layer in range(layers) if layer not in whole and layer - layers not in whole)
