"""Gather and combine, against torch.gather and Tensor.scatter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tokendrop.method import DrawContext, Stream, Uniform, combine_tokens, gather_tokens

WIDTH = 3
EXACT = 1e-12  # float64; the order of additions may differ


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Hidden states (B, S, D) and kept positions (B, K)."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    seed, kept = draw(st.integers(0, 10**6)), draw(st.integers(1, length))
    context = DrawContext(seed=seed, step=0, sample_ids_B=torch.arange(batch), sequence_length=length)
    (kept_BK,) = Uniform().select(context, (0,), (kept,))
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64), kept_BK


def a_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def through(hidden_BSD: Tensor, kept_BK: Tensor, layer: nn.Module, stream: Stream | None = None) -> Tensor:
    kept_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK, stream)
    return combine_tokens(rest_BSD, layer(kept_BKD), kept_BK, stream)


def by_torch(hidden_BSD: Tensor, kept_BK: Tensor, layer: nn.Module) -> Tensor:
    index = kept_BK[..., None].expand(-1, -1, hidden_BSD.shape[-1])
    return hidden_BSD.scatter(1, index, layer(hidden_BSD.gather(1, index)))


@given(cases())
@settings(max_examples=20)
def test_the_pair_has_the_right_gradient(case: tuple[Tensor, Tensor]) -> None:
    hidden_BSD, kept_BK = case
    layer = a_layer()
    assert torch.autograd.gradcheck(
        lambda hidden, *_: through(hidden, kept_BK, layer),
        (hidden_BSD.requires_grad_(), *layer.parameters()),
        check_undefined_grad=False,
    )


@given(cases())
def test_the_pair_equals_gather_and_scatter_forward_and_backward(case: tuple[Tensor, Tensor]) -> None:
    hidden_BSD, kept_BK = case
    layer = a_layer()
    inputs = (hidden_BSD.requires_grad_(), *layer.parameters())
    ours, theirs = through(hidden_BSD, kept_BK, layer), by_torch(hidden_BSD, kept_BK, layer)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@given(cases())
def test_a_chain_of_pairs_equals_a_chain_of_gathers_and_scatters(case: tuple[Tensor, Tensor]) -> None:
    """Each layer's gradient reaches the layer before it, for kept and for dropped tokens."""
    hidden_BSD, kept_BK = case
    first, second, later_BK = a_layer(), a_layer(), (hidden_BSD.shape[1] - 1 - kept_BK).flip(1)
    inputs = (hidden_BSD.requires_grad_(), *first.parameters())
    grads = [
        torch.autograd.grad(pair(pair(hidden_BSD, kept_BK, first), later_BK, second).square().sum(), inputs)
        for pair in (through, by_torch)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@given(cases())
def test_the_inputs_stay_as_they_were(case: tuple[Tensor, Tensor]) -> None:
    hidden_BSD, kept_BK = case
    before = hidden_BSD.clone()
    through(hidden_BSD, kept_BK, a_layer())
    assert torch.equal(hidden_BSD, before)


def test_the_outputs_take_the_dtype_of_the_residual_stream() -> None:
    kept_BK = torch.tensor([[0, 2]])
    rest, out = torch.zeros(1, 4, WIDTH), torch.ones(1, 2, WIDTH, dtype=torch.bfloat16)
    combined = combine_tokens(rest, out, kept_BK)
    assert combined.dtype == torch.float32
    assert combined.sum(-1).tolist() == [[WIDTH, 0, WIDTH, 0]]


def along(kinds: list[str], hidden_BSD: Tensor, kept_BK: Tensor, layer: nn.Module, stream: Stream | None) -> Tensor:
    """Layers that drop tokens, of two kinds of positions, and whole ones, one after the other."""
    positions = {"dropped": kept_BK, "dropped elsewhere": (hidden_BSD.shape[1] - 1 - kept_BK).flip(1)}
    for kind in kinds:
        if kind == "whole":
            hidden_BSD = hidden_BSD + layer(hidden_BSD)
        else:
            hidden_BSD = through(hidden_BSD, positions[kind], layer, stream)
    return hidden_BSD


@given(cases(), st.lists(st.sampled_from(["dropped", "dropped elsewhere", "whole"]), min_size=1, max_size=6))
def test_a_stream_changes_no_bit(case: tuple[Tensor, Tensor], kinds: list[str]) -> None:
    hidden_BSD, kept_BK = case
    before, layer = hidden_BSD.clone(), a_layer()
    inputs = (hidden_BSD.requires_grad_(), *layer.parameters())
    plain, streamed = (along(kinds, hidden_BSD, kept_BK, layer, stream) for stream in (None, Stream()))
    assert torch.equal(plain, streamed)
    for loss in (Tensor.sum, lambda out: out.square().sum()):  # the gradient of a sum is one number, seen many times
        grads = [torch.autograd.grad(loss(out), inputs, retain_graph=True) for out in (plain, streamed)]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert torch.equal(hidden_BSD, before)


class Copies(TorchDispatchMode):
    """Counts copies of all tokens."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.seen = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.aten.clone.default and args[0].numel() == self.numel
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("streams", "copies"), [(False, 5 + 5), (True, 2 + 2)])
def test_a_stream_copies_all_tokens_once_in_each_direction(streams: bool, copies: int) -> None:
    """For each row of dropped layers; a whole layer is between the two rows."""
    hidden_BSD, kept_BK = torch.randn(2, 8, WIDTH, dtype=torch.float64), torch.tensor([[0, 3], [2, 5]])
    kinds = ["dropped", "dropped elsewhere", "dropped", "whole", "dropped", "dropped elsewhere"]
    with Copies(hidden_BSD.numel()) as counted:
        along(kinds, hidden_BSD.requires_grad_(), kept_BK, a_layer(), Stream() if streams else None).sum().backward()
    assert counted.seen == copies


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_have_their_input(reentrant: bool) -> None:
    hidden_BSD, kept_BK = torch.randn(2, 8, WIDTH, dtype=torch.float64), torch.tensor([[0, 3], [2, 5]])
    layer, later_BK = a_layer(), torch.tensor([[0, 1], [5, 7]])
    inputs = (hidden_BSD.requires_grad_(), *layer.parameters())

    def all_layers(stream: Stream | None) -> Tensor:
        out_BSD = hidden_BSD
        for positions_BK in (kept_BK, later_BK, kept_BK):
            out_BSD = checkpoint(through, out_BSD, positions_BK, layer, stream, use_reentrant=reentrant)
        return out_BSD.square().sum()

    def gradients(stream: Stream | None) -> list[Tensor | None]:
        for one in inputs:
            one.grad = None
        all_layers(stream).backward()
        return [one.grad for one in inputs]

    plain = gradients(None)
    if reentrant:
        assert all(torch.equal(one, other) for one, other in zip(plain, gradients(Stream()), strict=True))
    else:  # rather than a wrong gradient
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(Stream())


def test_layers_in_a_stream_that_are_computed_again_on_other_tokens_say_so() -> None:
    hidden_BSD = torch.randn(1, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    positions = [torch.tensor([[0, 3]])]
    layer, stream = a_layer(), Stream()
    out_BSD = checkpoint(lambda one: through(one, positions[0], layer, stream), hidden_BSD, use_reentrant=False)
    positions[0] = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="computed it again on other tokens"):
        out_BSD.sum().backward()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("begun", [(0, 0), (0, 1), (1, 0), (1, 1)], ids="after {0[0]} and {0[1]} layers".format)
def test_layers_of_a_stream_that_are_not_one_after_the_other_copy(
    begun: tuple[int, int], order: tuple[int, int], goes_on: bool
) -> None:
    """Two towers, whose layers take turns; what comes first is the last to see the gradient, which all share."""
    kept_BK = torch.tensor([[0, 3], [2, 5]])
    layer, towers = a_layer(), [torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def both(stream: Stream | None) -> Tensor:
        first, outs = towers[0] + towers[1], [*towers]
        for place, layers in enumerate(begun):
            outs[place] = along(["dropped"] * layers, outs[place], kept_BK, layer, stream)
        gathered = [(place, *gather_tokens(outs[place], kept_BK, stream)) for place in order]
        for place, kept_BKD, rest_BSD in reversed(gathered):
            outs[place] = combine_tokens(rest_BSD, layer(kept_BKD), kept_BK, stream)
        if goes_on:
            outs[order[0]] = through(outs[order[0]], kept_BK, layer, stream)
        return (first + outs[0] + outs[1]).square().sum()

    plain, streamed = (torch.autograd.grad(both(stream), towers) for stream in (None, Stream()))
    for one, other in zip(plain, streamed, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


def test_a_stream_does_not_write_over_what_an_operation_has_saved() -> None:
    hidden_BSD, kept_BK = torch.randn(1, 4, WIDTH, dtype=torch.float64), torch.tensor([[0, 2]])
    layer, stream = a_layer(), Stream()
    first = through(hidden_BSD, kept_BK, layer, stream)
    saved = first.square().sum()
    out = through(first, kept_BK, layer, stream)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.sum() + saved).backward()
