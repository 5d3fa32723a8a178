"""Attention by batched products, against torch's written-out attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokendrop.models.attention import (
    attention_by_products,
    causal_attention,
    full_attention,
    masked_attention,
    takes_products,
)

EXACT = 1e-12  # float64
BF16 = 1e-2


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, S, W), not contiguous, as a model has them."""
    batch, number, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8, 64]))
    tokens = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    all_three = scale * torch.randn(batch, tokens, 3 * number * width, generator=generator, dtype=torch.float64)
    parts = all_three.split(number * width, dim=2)
    q, k, v = (part.view(batch, tokens, number, width).transpose(1, 2).requires_grad_() for part in parts)
    return q, k, v


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def later(tokens: int) -> Tensor:
    return torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)


@given(heads())
def test_outputs_and_gradients_are_those_of_torchs_attention(parts) -> None:
    check_same(attention_by_products(*parts, later(parts[0].shape[2])), by_torch(*parts), parts)


@given(heads(), st.integers(0, 10**6))
def test_with_padding_too(parts, seed: int) -> None:
    batch, number, tokens, _ = parts[0].shape
    real_B11S = torch.rand(batch, 1, 1, tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    real_B11S[..., 0] = True
    bias = torch.where(real_B11S, 0.0, -torch.inf).double().expand(-1, number, -1, -1).reshape(-1, 1, tokens)
    for out in (masked_attention(*parts, real_B11S), attention_by_products(*parts, bias)):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*parts, attn_mask=real_B11S.expand(-1, number, tokens, -1))
        check_same(out, expected, parts)


@given(parts=heads())
def test_every_token_sees_all_of_them(parts: tuple[Tensor, ...]) -> None:
    for out in (full_attention(*parts), attention_by_products(*parts, parts[0].new_zeros(1, 1))):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*parts)
        check_same(out, expected, parts)


def check_same(out: Tensor, expected: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Outputs and gradients."""
    torch.testing.assert_close(out, expected, rtol=EXACT, atol=EXACT)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    ours, theirs = (torch.autograd.grad((value * weights).sum(), parts) for value in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("tokens", [5, 128, 300])
def test_in_bf16_they_are_close_to_float32(tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, 2, tokens, 64, generator=generator, requires_grad=True) for _ in range(3)]
    rounded = [part.detach().bfloat16().requires_grad_() for part in parts]
    exact = [part.detach().float().requires_grad_() for part in rounded]
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_products(rounded[0], 0.0, keys=rounded[1].shape[2])
        out = causal_attention(*rounded)
    assert out.dtype == torch.bfloat16
    expected = by_torch(*exact)
    torch.testing.assert_close(out.float(), expected, rtol=BF16, atol=2 * BF16)
    grads = torch.autograd.grad(out.float().square().mean() * tokens, rounded)
    for one, other in zip(grads, torch.autograd.grad(expected.square().mean() * tokens, exact), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=BF16, atol=2 * BF16)


def chosen(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", dropout: float = 0.0) -> bool:
    return takes_products(torch.empty(shape, dtype=dtype, device=device), dropout, keys=shape[2])


def test_products_are_for_bf16_on_cpus_at_lengths_whose_scores_fit() -> None:
    assert chosen(8, 4, 128, 64)
    assert chosen(8, 4, 512, 64)
    assert not chosen(8, 16, 2048, 64)
    assert not chosen(8, 4, 128, 64, dropout=0.1)
    assert not chosen(8, 4, 128, 64, dtype=torch.float32)
    assert not chosen(8, 4, 128, 64, dtype=torch.float64)
    assert not chosen(8, 4, 128, 64, device="meta")


@given(heads())
def test_float64_stays_with_torchs_own_choice_bit_for_bit(parts) -> None:
    assert torch.equal(causal_attention(*parts), F.scaled_dot_product_attention(*parts, is_causal=True))
