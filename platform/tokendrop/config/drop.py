"""The methods of dropping that a job may name: which layers drop tokens, and how many they keep when."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from typing import Any, Literal

from tokendrop.config.drop_method import DropMethod, LayerByLayer, Layers
from tokendrop.config.layers import naming
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import Stages
from tokendrop.schedule.kept_length import Constant, Full, Schedule
from tokendrop.schedule.layer_dropout import DroppedSequences
from tokendrop.schedule.routes import RouteSchedule, Span


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfDepths(DropMethod):
    """A learned router chooses the tokens that go through a layer (Raposo et al. 2024, arXiv:2404.02258)."""

    learns = True
    wants_causal = True

    method: Literal["mixture_of_depths"] = "mixture_of_depths"
    every: int = 2
    """Which layers are routed: with 2 every other one, from the second on."""
    router_loss: float = 0.1
    """Weight of the cross entropy by which a router learns to tell, from a token alone, whether it is chosen."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every: want at least 1, for every layer, got {self.every}")
        if not 0 < self.router_loss < inf:
            raise ValueError(f"router_loss: want a number above 0, got {self.router_loss:g}")

    def spans(self, layers: int) -> tuple[Span, ...]:
        if self.every > layers:
            raise ValueError(f"drop.every: want at most {layers}, the model's layers, got {self.every}")
        return tuple((layer, layer) for layer in range(self.every - 1, layers, self.every))

    def selector_of(self, *, width: int, layers: int, seed: int) -> Any:
        from tokendrop.method import LearnedRouter

        routed = [first for first, _ in self.spans(layers)]
        return LearnedRouter(width=width, layers=routed, seed=seed, loss_weight=self.router_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSuperposition(DropMethod):
    """Bags of neighbouring tokens at first: their mean is read, the next bag predicted (Peng et al. 2026)."""

    cuts = True
    wants_causal = True

    method: Literal["token_superposition"] = "token_superposition"
    bag: int
    """Tokens of a bag; a divisor of the sequence length, of which there are two bags at least."""
    until: Duration = Duration(Fraction(30), "%")
    """Where ordinary training begins."""

    def __post_init__(self) -> None:
        if self.bag < 2:
            raise ValueError(f"bag: want at least 2 tokens, got {self.bag}")
        if self.by_layer or not isinstance(self.schedule, Full):
            raise ValueError("method 'token_superposition' goes by bag and until; leave out schedule and by_layer")

    @property
    def usual(self) -> tuple[str, Schedule]:
        return "drop.until", self.schedule

    def spans(self, layers: int) -> tuple[Span, ...]:
        return ((0, layers - 1),)

    def routes(self, layers: int, clock: Clock) -> tuple[RouteSchedule, ...]:
        length, end = clock.sequence_length, ceil(clock.steps(self.until))
        bags, rest = divmod(length, self.bag)
        if rest or bags < 2:
            raise ValueError(f"drop.bag: want a divisor of model.sequence_length={length} below it, got {self.bag}")
        stages = ((0, bags - 1), (end, length)) if end else ((0, length),)
        return tuple(RouteSchedule(span=span, kept=Stages(stages=stages)) for span in self.spans(layers))

    def shortened(self, batch: Any, kept_length: int) -> Any:
        return batch if batch.input_ids_BS.shape[1] == kept_length else batch.in_bags(self.bag)


DropConfig = (
    NoDropping
    | RandomLtd
    | ConstantDrop
    | Tread
    | SequenceWarmup
    | LayerDropout
    | TokenBypass
    | MixtureOfDepths
    | TokenSuperposition
    | DropMethod
)
"""All methods; `DropMethod` stands for those of the user's own."""


def _span(first: int, last: int, layers: int) -> tuple[Span, ...]:
    """One span, numbered from 0, of layers that may be numbered from the end."""
    if not all(-layers <= number < layers for number in (first, last)) or first % layers > last % layers:
        raise ValueError(f"drop: want first <= last of {layers} layers, got {first} and {last}")
    return ((first % layers, last % layers),)
