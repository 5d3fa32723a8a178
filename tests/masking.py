"""What dropping computes, without dropping: all tokens run, and the dropped ones are hidden and put back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokendrop.method import Dropping, Route
from tokendrop.models.gpt import Block, Gpt, rotary_angles, rotate


def by_masking(block: Block, x_BSD: Tensor, kept_BS: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The block over all tokens, where no query sees a dropped key or a later one; softmax written out."""
    (batch, tokens, width), heads = x_BSD.shape, block.attention.heads
    q, k, v = (
        part.view(batch, tokens, heads, width // heads).transpose(1, 2)
        for part in block.attention.qkv(block.norm_1(x_BSD)).split(width, dim=-1)
    )
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5
    earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = scores.masked_fill(~(earlier & kept_BS[:, None, None, :]), -torch.inf)
    mixed = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).reshape(batch, tokens, width)
    x_BSD = x_BSD + block.attention.out(mixed)
    return x_BSD + block.mlp(block.norm_2(x_BSD))


def is_kept(kept_BK: Tensor, tokens: int) -> Tensor:
    """bool (B, S)."""
    return torch.zeros(len(kept_BK), tokens, dtype=torch.bool).scatter(1, kept_BK, True)


def loss_by_masking(plain: Gpt, routes: Sequence[Route], dropping: Dropping, rows: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a model whose tokens pass routes by, with the drops that `dropping` has drawn."""
    ids_BS, labels_BS = rows
    tokens = ids_BS.shape[1]
    x_BSD = plain.tokens(ids_BS)
    rotary = None
    if plain.positions is None:
        rotary = rotary_angles(tokens, plain.config.width // plain.config.heads, x_BSD)
    else:
        x_BSD = x_BSD + plain.positions.weight[:tokens]
    ends = {route.last: route for route in routes}
    before_BSD = x_BSD
    for number, block in enumerate(plain.blocks):
        if number in {route.first for route in routes}:
            before_BSD = x_BSD
        kept_BK = dropping.kept(number)
        if kept_BK is None:
            x_BSD = block(x_BSD, rotary)
            continue
        kept_BS = is_kept(kept_BK, tokens)
        x_BSD = by_masking(block, x_BSD, kept_BS, rotary)
        if number in ends:
            x_BSD = torch.where(kept_BS[..., None], x_BSD, before_BSD)
    logits = plain.norm(x_BSD) @ plain.tokens.weight.T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())
