"""Which layers drop tokens, and how many they keep when."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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


Schedule = MslgConfig | LinearConfig | ConstantConfig | FullConfig | PiecewiseConfig
Layers = Literal["none", "first", "last", "first_and_last"] | tuple[int, ...]
Span = tuple[int, int]
"""Numbers, from 0, of the first and the last layer that a dropped token passes by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMethod:
    """What every method has.

    One of the user's own is a dataclass below this one, with a `method: str`, a `schedule` and keys of its own.
    """

    cuts: ClassVar[bool] = False
    """Whether sequences are cut to the kept length before the first layer, labels too."""

    def spans(self, layers: int) -> tuple[Span, ...]:
        """The routes that dropped tokens take in a model of so many layers, apart from each other."""
        raise NotImplementedError

    def selector(self) -> Any:
        """Who stays: a `tokendrop.method.Selector`; None for a uniform draw."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerByLayer(DropMethod):
    """What methods have in common whose layers drop tokens each on its own."""

    whole_layers: Layers = "first_and_last"
    """Layers that see every token: by name, or by number from 0 (from the end when negative)."""

    def spans(self, layers: int) -> tuple[Span, ...]:
        names: dict[object, tuple[int, ...]] = {"none": (), "first": (0,), "last": (-1,), "first_and_last": (0, -1)}
        whole = self.whole_layers if isinstance(self.whole_layers, tuple) else names[self.whole_layers]
        if not all(-layers <= number < layers for number in whole):
            raise ValueError(f"drop.whole_layers: want numbers of {layers} layers, got {list(whole)}")
        return tuple((layer, layer) for layer in range(layers) if layer not in whole and layer - layers not in whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDropping(LayerByLayer):
    """Every layer sees every token."""

    method: Literal["none"] = "none"
    schedule: Schedule = FullConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, FullConfig):
            raise ValueError("method is 'none', so this schedule would do nothing; set drop.method: random_ltd")

    def spans(self, layers: int) -> tuple[Span, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLtd(LayerByLayer):
    """Random and layerwise token dropping: each layer but the whole ones has a draw of its own (section 3.1)."""

    method: Literal["random_ltd"] = "random_ltd"
    schedule: Schedule = FullConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantDrop(LayerByLayer):
    """Random-LTD with one kept length for the whole run."""

    method: Literal["constant"] = "constant"
    kept: int

    @property
    def schedule(self) -> ConstantConfig:
        return ConstantConfig(kept=self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tread(DropMethod):
    """One draw for a span of layers, after which the dropped tokens rejoin (Krause et al. 2025, arXiv:2501.04765)."""

    method: Literal["tread"] = "tread"
    first: int = 1
    """Of the layers that dropped tokens pass by: a number from 0, or from the end when negative."""
    last: int = -2
    schedule: Schedule = FullConfig()

    def spans(self, layers: int) -> tuple[Span, ...]:
        first, last = self.first % layers, self.last % layers
        if not all(-layers <= number < layers for number in (self.first, self.last)) or first > last:
            raise ValueError(f"drop: want first <= last of {layers} layers, got {self.first} and {self.last}")
        return ((first, last),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWarmup(DropMethod):
    """Short sequences first: each is cut to its first tokens, labels too (Li et al. 2022, arXiv:2108.06084)."""

    cuts = True
    method: Literal["sequence_warmup"] = "sequence_warmup"
    schedule: Schedule = FullConfig()

    def spans(self, layers: int) -> tuple[Span, ...]:
        return ((0, layers - 1),)


DropConfig = NoDropping | RandomLtd | ConstantDrop | Tread | SequenceWarmup


def dropped_layers(spans: Iterable[Span]) -> tuple[int, ...]:
    """Numbers, from 0, of the layers that see only the kept tokens."""
    return tuple(layer for first, last in spans for layer in range(first, last + 1))
