"""Cross entropy of a language-model head, without all logits at once."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Dimensions: N tokens, C tokens of one chunk, T labels of a token, D width, V vocabulary.

# Logits of one chunk. On a GPU, 256 MiB in float32 keep it busy; on a CPU, 16 MiB stay below what glibc's threads
# can keep of freed memory (see train/device.py).
_LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


class HeadLoss(NamedTuple):
    """What the labels cost."""

    loss: Tensor
    """A scalar: the mean over the labels, or their sum by a divisor; nats."""
    losses_N: Tensor
    """That of each token, their mean where it has several labels, detached; 0 where there is none."""
    hits_N: Tensor
    """bool, alike: whether its first label is the most likely token; empty where gradients are wanted."""


def head_loss(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    bias_V: Tensor | None = None,
    divisor: Tensor | None = None,
    logits_at_once: int | None = None,
) -> HeadLoss:
    """Cross entropy of `linear(hidden, weight, bias)` against the labels, nats.

    Matrix products run in autocast's dtype where it is on; the softmax runs in float32, or in float64.

    Args:
        hidden: (..., D).
        labels: int64, of the shape (...), 0..V-1; with a divisor, one below 0 is none. Of the shape (..., T), each
            token has T labels that count 1/T each; so without a divisor alone.
        divisor: a scalar, of the sum; without one it is the number of tokens.
        logits_at_once: size of a chunk, by device when left out; it changes memory and speed, not the loss.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk = max(1, (logits_at_once or _LOGITS_AT_ONCE[device]) // weight_VD.shape[0])
    # asked here because inside of a Function no_grad can't be told from training
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    with torch.autocast(device, enabled=False):
        shape = hidden.shape[:-1]
        labels_NT = labels.reshape(shape.numel(), labels.shape[len(shape) :].numel())
        loss, losses_N, hits_N = _HeadLoss.apply(
            hidden.flatten(0, -2), weight_VD, bias_V, labels_NT, divisor, dtype, chunk, wants_grad
        )
        return HeadLoss(loss, losses_N.view(shape), hits_N if wants_grad else hits_N.view(shape))


class _HeadLoss(torch.autograd.Function):
    """Loss and its gradients chunk by chunk, both in the forward pass, so that no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_NT: Tensor,
        divisor: Tensor | None,
        dtype: torch.dtype,
        chunk: int,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        weight, bias = weight_VD.to(dtype), None if bias_V is None else bias_V.to(exact)
        grads = [torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)] if wants_grad else []
        if wants_grad and bias is not None:
            grads.append(torch.zeros_like(bias))
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        loss = torch.zeros((), dtype=exact, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            hidden, labels = hidden_ND[rows].to(dtype), labels_NT[rows]
            counts = None if divisor is None else labels >= 0
            logits_CV = (hidden @ weight.T).to(exact)
            log_p_CV = torch.log_softmax(logits_CV if bias is None else logits_CV + bias, dim=-1)
            log_p_CT = log_p_CV.gather(1, labels if counts is None else labels.clamp(min=0))
            log_p_CT = log_p_CT if counts is None else log_p_CT * counts
            loss -= log_p_CT.sum()
            losses.append(-log_p_CT.mean(1))
            if wants_grad:
                _add_gradients(grads, rows, log_p_CV, labels, counts, hidden, weight)
            else:
                hits.append(log_p_CV.argmax(1) == labels[:, 0])
        ctx.save_for_backward(*grads)
        ctx.divisor = labels_NT.numel() if divisor is None else divisor.to(exact)
        losses_N, hits_N = torch.cat(losses), torch.cat(hits) if hits else torch.empty(0, dtype=torch.bool)
        ctx.mark_non_differentiable(losses_N, hits_N)
        return loss / ctx.divisor, losses_N, hits_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        share = grad_loss / ctx.divisor
        grad_hidden, grad_weight, *grad_bias = (grad * share for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, *(grad_bias or [None]), None, None, None, None, None


def _add_gradients(
    grads: list[Tensor],
    rows: slice,
    log_p_CV: Tensor,
    labels_CT: Tensor,
    counts_CT: Tensor | None,
    hidden_CD: Tensor,
    weight_VD: Tensor,
) -> None:
    """Add the gradients of a chunk's sum: of hidden states, weight and bias; log_p is overwritten."""
    grad_logits = log_p_CV.exp_()  # T x softmax - the sum of one_hot
    exact = grad_logits.dtype
    if labels_CT.shape[1] > 1:
        grad_logits = grad_logits.mul_(labels_CT.shape[1])
    if counts_CT is not None:
        grad_logits, labels_CT = grad_logits.mul_(counts_CT), labels_CT.clamp(min=0)
    one_hot = -torch.ones_like(labels_CT, dtype=exact) if counts_CT is None else -counts_CT.to(exact)
    grad_logits = grad_logits.scatter_add_(1, labels_CT, one_hot).to(weight_VD.dtype)
    grads[0][rows] = grad_logits @ weight_VD
    grads[1] += grad_logits.T @ hidden_CD
    if len(grads) > 2:
        grads[2] += grad_logits.sum(0, dtype=exact)
