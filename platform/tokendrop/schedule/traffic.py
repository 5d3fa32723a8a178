"""What workers send each other in an optimizer step, by how they share the model out."""

from dataclasses import dataclass
from typing import Literal

from tokendrop.schedule.costs import ModelShape

Sharding = Literal["ddp", "fsdp", "zero_1", "zero_2", "zero_3"]
"""What each worker holds: all of the model, or its share of parts of it (`train.strategy` and `train.zero_stage`)."""

_VALUE_BYTES = 4  # weights and gradients travel in float32
_MOST_LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps from the forward to the backward pass: its own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Rounds of a ring of n workers, in which each sends (n - 1) / n of the bytes."""

    summed: int = 0
    """Bytes of all-reduces, each of which is two rounds."""
    gathered: int = 0
    """Bytes of all-gathers and reduce-scatters, one round each."""
    messages: int = 0
    """Rounds, one after the other."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.summed + self.gathered

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            summed=self.summed + other.summed,
            gathered=self.gathered + other.gathered,
            messages=self.messages + other.messages,
        )

    def of_sequences(self, count: int) -> "Passes":
        """The same rounds with so many times the bytes."""
        return Passes(summed=count * self.summed, gathered=count * self.gathered, messages=self.messages)

    def __mul__(self, times: int) -> "Passes":
        return Passes(summed=times * self.summed, gathered=times * self.gathered, messages=times * self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rounds of one optimizer step, by when they can travel."""

    forward: Passes = Passes()
    """In the forward pass of every micro batch."""
    backward: Passes = Passes()
    """In the backward pass of every micro batch."""
    last_backward: Passes = Passes()
    """In the backward pass of the last micro batch, beside that."""
    update: Passes = Passes()
    """After the optimizer has updated its share."""

    def of_step(self, accumulation: int) -> Passes:
        """All rounds of a step of so many micro batches."""
        return (self.forward + self.backward) * accumulation + self.last_backward + self.update


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """What each worker of a group does of a micro batch that they train together, and what they send each other."""

    size: int = 1
    """Workers of a group."""
    work: float = 1.0
    """Share of a micro batch's FLOPs that each of them has."""
    passes: Passes = Passes()
    """Within the group, for each sequence; forward and backward together."""
    update: Passes = Passes()
    """Within the group, once a step: gradients of what each of its workers has whole."""
    shares_model: bool = False
    """Whether each holds its share of the layers' matrices alone, the optimizer's state of them too."""

    def parameters(self, shape: ModelShape) -> int:
        """Parameters that each of them holds, before `Sharding`."""
        return shape.parameters - (shape.layer_parameters - self.layer_parameters(shape))

    def layer_parameters(self, shape: ModelShape) -> int:
        """Those of the layers alone."""
        return shape.layer_parameters // (self.size if self.shares_model else 1)


ALONE = GroupShare()
"""Every worker trains its micro batches by itself."""


GroupSplit = Literal["layers", "tokens"]
"""What a group shares out: heads and MLPs (`train.tensor_parallel`), or layers' tokens (`train.context_parallel`)."""


def group_share_of(
    split: GroupSplit, size: int, shape: ModelShape, *, layer_tokens: int, flops: float, kept: int
) -> GroupShare:
    """What each worker of a group has; what is outside of the layers all of them compute.

    Where heads and MLPs are shared out (Shoeybi et al. 2019, arXiv:1909.08053), attention and MLP are an all-reduce
    each of a layer's tokens, forward and backward. Where tokens are, keys, values and outputs are gathered, and their
    gradients added up; the first tokens' attention is less work than the last ones', which is left out.

    Args:
        layer_tokens: of one sequence, over all layers.
        flops: of one sequence.
        kept: tokens that reach the head where dropped ones do not.
    """
    if size == 1:
        return ALONE
    head = shape.flops_of((), sequences=1, kept=kept)
    work, layer_bytes = (head + (flops - head) / size) / flops, layer_tokens * shape.width * _VALUE_BYTES
    if split == "layers":
        passes = Passes(summed=2 * 2 * 2 * layer_bytes, messages=2 * 2 * 2 * shape.layers)
        whole_bytes = (shape.parameters - shape.layer_parameters) * _VALUE_BYTES
        update = Passes(summed=2 * whole_bytes, messages=2)
        return GroupShare(size=size, work=work, passes=passes, update=update, shares_model=True)
    passes = Passes(gathered=2 * 3 * layer_bytes, messages=2 * 3 * shape.layers)
    return GroupShare(size=size, work=work, passes=passes)


def traffic(shape: ModelShape, sharding: Sharding, share: GroupShare = ALONE) -> Traffic:
    """What a step sends, as torch's DDP and FSDP2 and as DeepSpeed do it with this project's settings.

    FSDP gathers each layer in the forward and again in the backward pass, what is outside of the layers once, and sums
    gradients after every micro batch. ZeRO-1 and 2 all-reduce gradients, after the last and after every micro batch,
    and gather the updated weights. ZeRO-3 gathers weights as FSDP does, but keeps those of smaller models for the
    backward pass. What groups of workers send each other beside that is in `share`.
    """
    size, in_layers = share.parameters(shape) * _VALUE_BYTES, share.layer_parameters(shape) * _VALUE_BYTES
    all_reduce, gather = Passes(summed=2 * size, messages=2), Passes(gathered=size, messages=1)
    if sharding == "ddp":
        return Traffic(last_backward=all_reduce)
    if sharding == "zero_1":
        return Traffic(last_backward=all_reduce, update=gather)
    if sharding == "zero_2":
        return Traffic(backward=all_reduce, update=gather)
    layers = Passes(gathered=in_layers, messages=shape.layers)
    whole = layers + Passes(gathered=size - in_layers, messages=1)
    again = layers if sharding == "fsdp" or shape.parameters > _MOST_LIVE else Passes()
    return Traffic(forward=whole, backward=again + whole)
