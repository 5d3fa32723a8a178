"""Gather and combine, against torch.gather and Tensor.scatter."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tokendrop.method import DrawContext, Uniform, combine_tokens, gather_tokens

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


def through(hidden_BSD: Tensor, kept_BK: Tensor, layer: nn.Module) -> Tensor:
    kept_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK)
    return combine_tokens(rest_BSD, layer(kept_BKD), kept_BK)


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
