"""What every method of dropping has, those of the user's own too."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from tokendrop.config.layers import keys_by_span, naming
from tokendrop.schedule.adaptive import Adaptive
from tokendrop.schedule.duration import Clock
from tokendrop.schedule.kept_by_step import KeptByStep, in_buckets
from tokendrop.schedule.kept_length import Full, Schedule
from tokendrop.schedule.routes import Counts, RouteSchedule, Span

Layers = Literal["none", "first", "last", "first_and_last"] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMethod(ABC):
    """What every method has; one of the user's own is a dataclass below this one, with keys of its own."""

    cuts: ClassVar[bool] = False
    """Whether sequences are `shortened` to the kept length before the first layer, labels too."""
    counts: ClassVar[Counts] = "tokens"
    wants_causal: ClassVar[bool] = False
    """Whether models must be causal."""
    by_token_loss: ClassVar[bool] = False
    """Whether tokens are chosen by the loss that they had."""
    learns: ClassVar[bool] = False
    """Whether a learned router chooses: its parameters are the model's, in evaluation too."""

    method: str
    """The method's name, or where the user's own class is."""
    schedule: Schedule = Full()
    """The kept length by step."""
    by_layer: Mapping[str, Schedule] = field(default_factory=dict[str, Schedule], hash=False)
    """Other schedules for some of the layers, by number (from the end when negative) or range: `1-4`."""
    buckets: int | None = None
    """Different kept lengths of each schedule, at most: evenly spaced from its lowest to its highest one, to the
    nearest of which each step's is rounded. They are part of the plan. For few graphs under `train.compile: static`."""

    @property
    def has_known_shapes(self) -> bool:
        """Whether the plan says before the run how many sequences and tokens layers are called with."""
        return not self.adaptive and not self.learns and self.counts == "tokens"

    @abstractmethod
    def spans(self, layers: int) -> tuple[Span, ...]:
        """The routes that dropped tokens take in a model of so many layers, apart from each other and in order."""

    def routes(self, layers: int, clock: Clock) -> tuple[RouteSchedule, ...]:
        """Each span of a model of so many layers, with what stays in it.

        Raises:
            ValueError: a schedule does not fit the run or the method, or a key of `by_layer` the layers; the message
                names the key.
        """
        for key in self.adaptive if self.cuts or self.learns or self.counts != "tokens" else ():
            raise ValueError(
                f"drop.{key}: kind 'adaptive' evaluates with dropping and without, which method '{self.method}' can't;"
                " want another kind, or method random_ltd"
            )
        for key in self.adaptive:
            if not self.spans_of(key, layers):
                raise ValueError(
                    f"drop.{key}: no layer goes by this schedule, so nothing would be decided; leave it out"
                )
        spans = self.spans(layers)
        key_of = keys_by_span(self.by_layer, spans, layers)
        usual = _resolved(*self.usual, clock)
        others = {key: _resolved(f"drop.by_layer.{key}", one, clock) for key, one in self.by_layer.items()}
        return tuple(RouteSchedule(span=span, kept=others[key_of[span]] if span in key_of else usual) for span in spans)

    def planned(self, layers: int, clock: Clock) -> tuple[RouteSchedule, ...]:
        """The `routes` as they are trained, what stays rounded to `buckets`; raises as `routes` does."""
        routes = self.routes(layers, clock)
        if self.buckets is None:
            return routes
        with naming("drop.buckets"):
            if self.buckets < 2:
                raise ValueError(f"want at least 2 kept lengths, got {self.buckets}")
            if not routes or self.counts != "tokens":
                raise ValueError(f"method '{self.method}' has no kept length by step to round; leave it out")
            if self.adaptive:
                raise ValueError(
                    "kept lengths of kind 'adaptive' are decided within a budget of layer tokens, which rounding would"
                    " miss; want a larger increment"
                )
        return tuple(replace(route, kept=in_buckets(route.kept, self.buckets)) for route in routes)

    @property
    def usual(self) -> tuple[str, Schedule]:
        """The schedule of the layers that `by_layer` does not name, behind the key that gives it."""
        return "drop.schedule", self.schedule

    @property
    def adaptive(self) -> Mapping[str, Adaptive]:
        """The schedules that are decided while the run goes, by key below `drop`."""
        schedules = {"schedule": self.schedule, **{f"by_layer.{key}": one for key, one in self.by_layer.items()}}
        return {key: one for key, one in schedules.items() if isinstance(one, Adaptive)}

    def with_decided(self, decided: Mapping[str, Sequence[int]]) -> Self:
        """With the kept lengths that are decided of some `adaptive` schedules, by key."""
        changed = {key: replace(self.adaptive[key], decided=tuple(kept)) for key, kept in decided.items()}
        by_layer = {key: changed.get(f"by_layer.{key}", one) for key, one in self.by_layer.items()}
        return replace(self, schedule=changed.get("schedule", self.schedule), by_layer=by_layer)

    def spans_of(self, schedule: str, layers: int) -> tuple[Span, ...]:
        """The spans, of `spans`, that go by a schedule, a key below `drop`."""
        spans = self.spans(layers)
        key_of = keys_by_span(self.by_layer, spans, layers)
        names = {span: f"by_layer.{key_of[span]}" if span in key_of else "schedule" for span in spans}
        return tuple(span for span in spans if names[span] == schedule)

    @property
    def keeps_special(self) -> bool:
        """Whether the batch's special tokens stay in every layer."""
        return False

    def shortened(self, batch: Any, kept_length: int) -> Any:
        """A micro batch of the task as it is trained on where the method `cuts`: the first tokens of each sequence."""
        return batch.cut(kept_length)

    def selector(self) -> Any:
        """Who stays: a `tokendrop.method.Selector`; None for a uniform draw."""
        return None

    def selector_of(self, *, width: int, layers: int, seed: int) -> Any:
        """The selector in a model of such layers, for selectors with parameters of their own."""
        return self.selector()

    def scores(self, vocab_size: int, device: Any = None) -> Any:
        """The `tokendrop.method.TokenScores` that a run keeps for its selector; None where it needs none."""
        return None

    def check(self, vocab_size: int) -> None:  # noqa: B027 - most methods have no such key
        """Raises ValueError where a key does not fit the model's vocabulary; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerByLayer(DropMethod):
    """What methods have in common whose layers drop tokens each on its own."""

    full_length_layers: Layers = "first_and_last"
    """Layers that see every token: by name, or by number from 0 (from the end when negative)."""

    def spans(self, layers: int) -> tuple[Span, ...]:
        names: dict[object, tuple[int, ...]] = {"none": (), "first": (0,), "last": (-1,), "first_and_last": (0, -1)}
        whole = (
            self.full_length_layers if isinstance(self.full_length_layers, tuple) else names[self.full_length_layers]
        )
        if not all(-layers <= number < layers for number in whole):
            raise ValueError(f"drop.full_length_layers: want numbers of {layers} layers, got {list(whole)}")
        return tuple((layer, layer) for layer in range(layers) if layer not in whole and layer - layers not in whole)


def _resolved(key: str, schedule: Schedule, clock: Clock) -> KeptByStep:
    """A schedule's kept lengths by step; ValueError, which names its key, where they don't fit the run."""
    with naming(key):
        kept = schedule.resolve(clock)
        longest = kept.at(clock.total_steps)
        if longest > clock.sequence_length:
            raise ValueError(f"a kept length of {longest} is over model.sequence_length={clock.sequence_length}")
    return kept
