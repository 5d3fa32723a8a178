"""The head's loss in chunks, against cross entropy over all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokendrop.models.loss import head_loss

EXACT = 1e-12  # float64
BF16 = 1e-2
WIDTH, VOCAB = 6, 11


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Hidden states (B, S, D), head (V, D), labels (B, S), and logits at once, from one row to more than there are."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    hidden = torch.randn(batch, tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = draw(st.sampled_from([0.1, 1.0, 30.0])) * torch.randn(
        VOCAB, WIDTH, generator=generator, dtype=torch.float64
    )
    labels = torch.randint(VOCAB, (batch, tokens), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, draw(st.integers(1, 30 * VOCAB))


def all_at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())


@given(cases())
def test_the_loss_and_both_gradients_are_those_of_cross_entropy(case) -> None:
    hidden, weight, labels, at_once = case
    loss, expected = head_loss(hidden, weight, labels, logits_at_once=at_once)[0], all_at_once(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    scale = 0.7  # as accumulation scales it
    ours, theirs = (torch.autograd.grad(scale * value, (hidden, weight)) for value in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@given(cases(), st.integers(2, 4), st.integers(0, 10**6))
def test_of_several_labels_each_counts_alike_also_one_that_is_there_twice(case, several: int, seed: int) -> None:
    hidden, weight, labels, at_once = case
    generator = torch.Generator().manual_seed(seed)
    bags = torch.randint(3, (*labels.shape, several), generator=generator)
    loss, losses, _ = head_loss(hidden, weight, bags, logits_at_once=at_once)
    soft = F.one_hot(bags, VOCAB).double().mean(-2)
    each = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), soft.flatten(0, 1), reduction="none")
    torch.testing.assert_close(losses.flatten(), each.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(loss, each.mean(), rtol=EXACT, atol=EXACT)
    ours, theirs = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, each.mean()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@given(cases())
def test_without_gradients_the_loss_is_the_same_and_has_no_graph(case) -> None:
    hidden, weight, labels, at_once = case
    with torch.no_grad():
        loss = head_loss(hidden, weight, labels, logits_at_once=at_once)[0]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, all_at_once(hidden, weight, labels), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_its_own(frozen: str) -> None:
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=frozen != "hidden")
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=frozen != "weight")
    labels = torch.randint(VOCAB, (2, 3))
    free = weight if frozen == "hidden" else hidden
    ours, theirs = (
        torch.autograd.grad(loss, free)[0]
        for loss in (head_loss(hidden, weight, labels)[0], all_at_once(hidden, weight, labels))
    )
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_under_bf16_autocast_the_loss_stays_in_float32_and_close() -> None:
    hidden = torch.randn(2, 50, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    labels = torch.randint(VOCAB, (2, 50))
    expected = all_at_once(hidden, weight, labels)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(hidden, weight, labels)[0]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=BF16, atol=BF16)
    for one, other in zip(torch.autograd.grad(loss, (hidden, weight)), theirs, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=BF16, atol=BF16)


@given(cases())
def test_each_label_has_its_own_loss_without_a_gradient(case) -> None:
    hidden, weight, labels, at_once = case
    _, losses, _ = head_loss(hidden, weight, labels, logits_at_once=at_once)
    each = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), each, rtol=EXACT, atol=EXACT)
    assert not losses.requires_grad


def with_gaps(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Labels of which some are none."""
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, -100)


@given(cases(), st.integers(0, 10**6))
def test_with_a_bias_and_a_divisor_it_is_the_sum_over_the_labels_that_there_are(case, seed: int) -> None:
    hidden, weight, labels, at_once = case
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    labels, divisor = with_gaps(labels, generator), torch.tensor(0.37, dtype=torch.float64)
    loss, losses, _ = head_loss(hidden, weight, labels, bias_V=bias, divisor=divisor, logits_at_once=at_once)
    logits = F.linear(hidden, weight, bias)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    expected = each.sum() / divisor
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(losses, each, rtol=EXACT, atol=EXACT)
    ours, theirs = (torch.autograd.grad(0.7 * value, (hidden, weight, bias)) for value in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


def test_a_divisor_is_never_rounded_to_bf16() -> None:
    hidden = torch.randn(2, 50, WIDTH, requires_grad=True)
    weight, bias = torch.randn(VOCAB, WIDTH, requires_grad=True), torch.randn(VOCAB, requires_grad=True)
    labels = with_gaps(torch.randint(VOCAB, (2, 50)), torch.Generator().manual_seed(1))
    grads: list[tuple[Tensor, ...]] = []
    for divisor in (1.0, 1.003):  # which is 1 in bf16
        with torch.autocast("cpu", torch.bfloat16):
            loss = head_loss(hidden, weight, labels, bias_V=bias, divisor=torch.tensor(divisor).double()).loss
        assert loss.dtype == torch.float32
        grads.append(torch.autograd.grad(loss * divisor, (hidden, weight, bias)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@given(cases())
def test_hits_are_the_labels_that_are_most_likely(case) -> None:
    hidden, weight, labels, at_once = case
    hits = head_loss(hidden, weight, labels, logits_at_once=at_once).hits_N
    assert torch.equal(hits, F.linear(hidden, weight).argmax(-1) == labels)
