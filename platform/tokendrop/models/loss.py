"""Cross entropy of a language-model head, without all logits at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Dimensions: N tokens, C tokens of one chunk, D width, V vocabulary.

# Logits of one chunk. On a GPU, 256 MiB in float32 keep it busy; on a CPU, 16 MiB stay below what glibc's threads
# can keep of freed memory (see train/device.py).
_LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


def head_loss(
    hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, *, logits_at_once: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of `linear(hidden, weight)` against the labels, nats: the mean, and that of each label, detached.

    Matrix products run in autocast's dtype where it is on; the softmax runs in float32, or in float64.

    Args:
        logits_at_once: size of a chunk, by device when left out; it changes memory and speed, not the loss.
    """
    device = hidden_BSD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BSD.dtype
    chunk = max(1, (logits_at_once or _LOGITS_AT_ONCE[device]) // weight_VD.shape[0])
    # asked here because inside of a Function no_grad can't be told from training
    wants_grad = torch.is_grad_enabled() and (hidden_BSD.requires_grad or weight_VD.requires_grad)
    with torch.autocast(device, enabled=False):
        labels_N = labels_BS.flatten()
        mean, losses_N = _HeadLoss.apply(hidden_BSD.flatten(0, 1), weight_VD, labels_N, dtype, chunk, wants_grad)
        return mean, losses_N.view(labels_BS.shape)


class _HeadLoss(torch.autograd.Function):
    """Loss and its gradients chunk by chunk, both in the forward pass, so that no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        dtype: torch.dtype,
        chunk: int,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VD.to(dtype)
        exact = torch.promote_types(dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if wants_grad else None
        grad_weight = torch.zeros_like(weight_VD) if wants_grad else None
        loss = torch.zeros((), dtype=exact, device=hidden_ND.device)
        losses: list[Tensor] = []
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            hidden, labels = hidden_ND[rows].to(dtype), labels_N[rows, None]
            log_p_CV = torch.log_softmax((hidden @ weight.T).to(exact), dim=-1)
            log_p_C = log_p_CV.gather(1, labels)
            loss -= log_p_C.sum()
            losses.append(-log_p_C[:, 0])
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = log_p_CV.exp_()  # softmax - one_hot, to be divided by N
                grad_logits = grad_logits.scatter_add_(1, labels, -torch.ones_like(labels, dtype=exact)).to(dtype)
                grad_hidden[rows] = grad_logits @ weight
                grad_weight += grad_logits.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        losses_N = torch.cat(losses)
        ctx.mark_non_differentiable(losses_N)
        return loss / len(hidden_ND), losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        share = grad_loss / len(grad_hidden)
        return grad_hidden * share, grad_weight * share, None, None, None, None
