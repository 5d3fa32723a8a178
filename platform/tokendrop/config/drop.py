"""Which layers drop tokens, and how many they keep when."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tokendrop.config.layers import keys_by_span, naming
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_length import Constant, Full, KeptByStep, Schedule
from tokendrop.schedule.layer_dropout import DroppedSequences
from tokendrop.schedule.routes import Counts, RouteSchedule, Span

Layers = Literal["none", "first", "last", "first_and_last"] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMethod(ABC):
    """What every method has; one of the user's own is a dataclass below this one, with keys of its own."""

    cuts: ClassVar[bool] = False
    """Whether sequences are cut to the kept length before the first layer, labels too."""
    counts: ClassVar[Counts] = "tokens"
    by_token_loss: ClassVar[bool] = False
    """Whether tokens are chosen by the loss that they had."""

    method: str
    """The method's name, or where the user's own class is."""
    schedule: Schedule = Full()
    """The kept length by step."""
    by_layer: Mapping[str, Schedule] = field(default_factory=dict[str, Schedule], hash=False)
    """Other schedules for some of the layers, by number (from the end when negative) or range: `1-4`."""

    @abstractmethod
    def spans(self, layers: int) -> tuple[Span, ...]:
        """The routes that dropped tokens take in a model of so many layers, apart from each other and in order."""

    def routes(self, layers: int, clock: Clock) -> tuple[RouteSchedule, ...]:
        """Each span of a model of so many layers, with what stays in it.

        Raises:
            ValueError: a schedule does not fit the run, or a key of `by_layer` the layers; the message names the key.
        """
        spans = self.spans(layers)
        key_of = keys_by_span(self.by_layer, spans, layers)
        usual = _resolved(*self.usual, clock)
        others = {key: _resolved(f"drop.by_layer.{key}", one, clock) for key, one in self.by_layer.items()}
        return tuple(RouteSchedule(span=span, kept=others[key_of[span]] if span in key_of else usual) for span in spans)

    @property
    def usual(self) -> tuple[str, Schedule]:
        """The schedule of the layers that `by_layer` does not name, behind the key that gives it."""
        return "drop.schedule", self.schedule

    @property
    def keeps_special(self) -> bool:
        """Whether the batch's special tokens stay in every layer."""
        return False

    def selector(self) -> Any:
        """Who stays: a `tokendrop.method.Selector`; None for a uniform draw."""
        return None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDropping(LayerByLayer):
    """Every layer sees every token."""

    method: Literal["none"] = "none"

    def __post_init__(self) -> None:
        if self.by_layer or not isinstance(self.schedule, Full):
            raise ValueError("method is 'none', so this schedule would do nothing; set drop.method: random_ltd")

    def spans(self, layers: int) -> tuple[Span, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLtd(LayerByLayer):
    """Random and layerwise token dropping: each layer but the whole ones has a draw of its own (section 3.1)."""

    method: Literal["random_ltd"] = "random_ltd"
    keep_special_tokens: bool = False
    """Whether [CLS] and [SEP] stay in every layer, among the kept length; the paper drops them like all others."""

    @property
    def keeps_special(self) -> bool:
        return self.keep_special_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantDrop(LayerByLayer):
    """Random-LTD with one kept length for the whole run."""

    method: Literal["constant"] = "constant"
    kept: int

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Full):
            raise ValueError("method 'constant' keeps `kept` tokens throughout, so this schedule would do nothing")

        with naming("kept"):
            Constant(kept=self.kept)

    @property
    def usual(self) -> tuple[str, Schedule]:
        return "drop.kept", Constant(kept=self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tread(DropMethod):
    """One draw for a span of layers, after which the dropped tokens rejoin (Krause et al. 2025, arXiv:2501.04765)."""

    method: Literal["tread"] = "tread"
    first: int = 1
    """Of the layers that dropped tokens pass by: a number from 0, or from the end when negative."""
    last: int = -2

    def spans(self, layers: int) -> tuple[Span, ...]:
        return _span(self.first, self.last, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWarmup(DropMethod):
    """Short sequences first: each is cut to its first tokens, labels too (Li et al. 2022, arXiv:2108.06084)."""

    cuts = True
    method: Literal["sequence_warmup"] = "sequence_warmup"

    def spans(self, layers: int) -> tuple[Span, ...]:
        return ((0, layers - 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDropout(LayerByLayer):
    """Whole sequences pass layers by, at random (Zhang & He 2020, arXiv:2010.13369)."""

    counts = "sequences"
    method: Literal["layer_dropout"] = "layer_dropout"
    full_length_layers: Layers = "none"
    keep: float
    """Share of the sequences that a layer runs on in the end, or would if it came after the last one; at least one."""
    time_constant: Duration | None = None
    """Of the way from 1 to that share, such as `1%`: after it 63% is done; null for that share from the start."""
    by_depth: bool = True
    """Whether layers drop in proportion to the layers before them, the first one nothing; else all alike."""
    rescale: bool = True
    """Whether what a layer adds is divided by the share of sequences that it runs on."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep: want a share above 0 and at most 1, got {self.keep:g}")
        if self.time_constant is not None and not self.time_constant.amount:
            raise ValueError("time_constant: want more than 0, or null for the final share from the start")
        if self.by_layer or not isinstance(self.schedule, Full):
            raise ValueError("method 'layer_dropout' goes by keep and time_constant; leave out schedule and by_layer")

    @property
    def usual(self) -> tuple[str, Schedule]:
        return "drop.time_constant", self.schedule

    def routes(self, layers: int, clock: Clock) -> tuple[RouteSchedule, ...]:
        steps = None if self.time_constant is None else float(clock.steps(self.time_constant))

        def kept(layer: int) -> DroppedSequences:
            share = (1 - self.keep) * (layer / layers if self.by_depth else 1)
            return DroppedSequences(sequences=clock.global_batch, share=share, time_constant=steps)

        return tuple(RouteSchedule(span=span, kept=kept(span[0])) for span in self.spans(layers))

    def selector(self) -> Any:
        from tokendrop.method import WholeSequences

        return WholeSequences(rescales=self.rescale)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBypass(DropMethod):
    """The tokens of the least accumulated loss pass a span of layers by (Hou et al. 2022, arXiv:2203.13240)."""

    by_token_loss = True

    method: Literal["token_bypass"] = "token_bypass"
    first: int | None = None
    """Of the layers that dropped tokens pass by; the one before the middle when left out, as in the paper."""
    last: int = -2
    special_tokens: tuple[int, ...] = ()
    """Numbers of tokens that stay before all others, such as [CLS], [SEP] and [MASK]."""
    padding_tokens: tuple[int, ...] = ()
    """Numbers of tokens that leave before all others."""
    beta: float = 0.995
    """What a step leaves of the running score of a token that is among its labels."""
    initial: float = 10.0
    """Score, nats, of a token that has been no label yet."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta: want at least 0 and less than 1, got {self.beta:g}")

    def check(self, vocab_size: int) -> None:
        for key, tokens in (("special_tokens", self.special_tokens), ("padding_tokens", self.padding_tokens)):
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError(f"drop.{key}: want numbers of tokens in 0..{vocab_size - 1}, got {list(tokens)}")
        if both := set(self.special_tokens) & set(self.padding_tokens):
            raise ValueError(f"drop.padding_tokens: {sorted(both)} are special_tokens too; want each token in one")

    def spans(self, layers: int) -> tuple[Span, ...]:
        return _span(max(0, layers // 2 - 1) if self.first is None else self.first, self.last, layers)

    def selector(self) -> Any:
        from tokendrop.method import HighestScore

        return HighestScore()

    def scores(self, vocab_size: int, device: Any = None) -> Any:
        from tokendrop.method import TokenScores

        return TokenScores(
            vocab_size,
            beta=self.beta,
            initial=self.initial,
            special_tokens=self.special_tokens,
            padding_tokens=self.padding_tokens,
            device=device,
        )


DropConfig = NoDropping | RandomLtd | ConstantDrop | Tread | SequenceWarmup | LayerDropout | TokenBypass | DropMethod
"""All methods; `DropMethod` stands for those of the user's own."""


def _resolved(key: str, schedule: Schedule, clock: Clock) -> KeptByStep:
    """A schedule's kept lengths by step; ValueError, which names its key, where they don't fit the run."""
    with naming(key):
        kept = schedule.resolve(clock)
        longest = kept.at(clock.total_steps)
        if longest > clock.sequence_length:
            raise ValueError(f"a kept length of {longest} is over model.sequence_length={clock.sequence_length}")
    return kept


def _span(first: int, last: int, layers: int) -> tuple[Span, ...]:
    """One span, numbered from 0, of layers that may be numbered from the end."""
    if not all(-layers <= number < layers for number in (first, last)) or first % layers > last % layers:
        raise ValueError(f"drop: want first <= last of {layers} layers, got {first} and {last}")
    return ((first % layers, last % layers),)
