"""How many FLOP/s a kind of GPU could reach, by its maker."""

import re

import torch

# Dense bf16 FLOP/s with float32 sums, from NVIDIA's data sheets; a card of several forms has that of its own first.
_BF16 = (
    (r"B200", 2250e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"(H100|H200|GH200)", 989e12),
    (r"A100", 312e12),
    (r"L40S", 362e12),
    (r"L4", 121e12),
    (r"A10", 125e12),
)


def peak_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Dense matrix FLOP/s of a whole device; None where they are not known: other devices, a share of one, float32."""
    if dtype != torch.bfloat16 or re.search(r"\bMIG\b", name):
        return None
    return next((peak for pattern, peak in _BF16 if re.search(rf"\b{pattern}\b", name)), None)
