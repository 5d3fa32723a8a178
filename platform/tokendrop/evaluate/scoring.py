"""Log-likelihoods and greedy text of a GPT.

Equal inputs and equal beginnings are computed once, and the head only where it is read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from tokendrop.evaluate.branches import Row, Tokens, as_inputs, joined, padded

# Dimensions: B rows of a batch, S tokens of its longest row, D width, N read positions, V vocabulary.


class LanguageModel(Protocol):
    """A causal language model of tokens."""

    sequence_length: int
    """Tokens that it takes at most."""
    vocab_size: int
    device: torch.device

    def eval(self) -> Self:
        """The model, with dropout and token dropping off."""
        ...

    def hidden(self, input_ids_BS: Tensor) -> Tensor:
        """Hidden states (B, S, D) before the head; each depends on no later token."""
        ...

    def hidden_branches(self, input_ids_BS: Tensor, positions_BS: Tensor, sees_BSS: Tensor) -> Tensor:
        """As `hidden`, of tokens at other positions than their places, which attend to those that they see."""
        ...

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V) of the token after each."""
        ...


Progress = Callable[[int], object]

BATCH_TOKENS = 2**14  # tokens of one forward pass, padding included
_LOGITS = 2**24  # logits held at once


@torch.inference_mode()
def score_continuations(
    model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]], progress: Progress, batch_tokens: int = BATCH_TOKENS
) -> list[tuple[float, bool]]:
    """How likely each continuation is after its context.

    Args:
        pairs: context and continuation, at least one token each; a context that is too long loses its head.
        progress: told how many pairs were scored since it was told last.
        batch_tokens: tokens of one forward pass, padding included; one row may have more.
    Returns:
        For each pair the log-likelihood, nats, and whether greedy decoding would write the continuation.
    """
    by_input: dict[Tokens, list[int]] = defaultdict(list)
    for number, (context, continuation) in enumerate(pairs):
        by_input[(context + continuation)[-model.sequence_length - 1 : -1]].append(number)
    # twice as long as the model's: choices after a long context are still worth one row
    rows = joined(by_input, longest=2 * model.sequence_length)
    scores: dict[int, tuple[float, bool]] = {}
    for batch in batches_of_rows(rows, batch_tokens):
        hidden_BSD = hidden_of(model, batch)
        targets_read = [
            (number, hidden_BSD[b, row.last(text, len(pairs[number][1]))], pairs[number][1])
            for b, row in enumerate(batch)
            for text, tokens in enumerate(row.texts)
            for number in by_input[tokens]
        ]
        targets = [token for _, _, target in targets_read for token in target]
        logprobs_N, is_top_N = read_head(model, torch.cat([read for _, read, _ in targets_read]), targets)
        lengths = [len(target) for _, _, target in targets_read]
        parts = zip(targets_read, logprobs_N.split(lengths), is_top_N.split(lengths), strict=True)
        scores |= {number: (float(logprobs.sum()), bool(top.all())) for (number, _, _), logprobs, top in parts}
        progress(len(targets_read))
    return [scores[number] for number in range(len(pairs))]


def batches_of_rows(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Batches as of `batches`: of rows with several texts, and of the others."""
    for some in ([row for row in rows if len(row.texts) > 1], [row for row in rows if len(row.texts) == 1]):
        yield from ([some[i] for i in batch] for batch in batches([len(row) for row in some], batch_tokens))


def hidden_of(model: LanguageModel, rows: Sequence[Row]) -> Tensor:
    """Hidden states (B, S, D) of rows that all have several texts, or all have one."""
    if len(rows[0].texts) > 1:
        return model.hidden_branches(*as_inputs(rows, model.device))
    return model.hidden(pad([row.tokens for row in rows], model))


def read_head(model: LanguageModel, hidden_ND: Tensor, tokens_N: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probability of one token at each position, float64 (N), and whether it is the likeliest one."""
    targets_N = torch.tensor(tokens_N, device=hidden_ND.device)
    chunk = max(1, _LOGITS // model.vocab_size)
    logprobs, is_top = [], []
    for hidden, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
        logits_NV = model.head(hidden)
        chosen = logits_NV.gather(1, targets[:, None])[:, 0]
        logprobs.append((chosen - logits_NV.logsumexp(-1)).double())
        is_top.append(logits_NV.argmax(-1) == targets)
    return torch.cat(logprobs).cpu(), torch.cat(is_top).cpu()


@torch.inference_mode()
def write_greedily(
    model: LanguageModel,
    contexts: Sequence[Tokens],
    limits: Sequence[int],
    is_done: Callable[[int, Tokens], bool],
    progress: Progress,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Tokens]:
    """The likeliest token after each context, again and again.

    The model keeps no keys and values, so each token costs a forward pass over all before it.

    Args:
        contexts: at least one token each; with what is written they must stay within the model's length.
        limits: how many tokens to write after each, at least 1.
        is_done: given a context's number and what was written after it, whether to stop before the limit.
        progress: told how many contexts are done since it was told last.
        batch_tokens: as of `score_continuations`.
    Returns:
        What was written after each context.
    """
    written: list[Tokens] = [()] * len(contexts)
    lengths = [len(context) + limit for context, limit in zip(contexts, limits, strict=True)]
    for active in batches(lengths, batch_tokens):
        while active:
            rows = [contexts[number] + written[number] for number in active]
            for number, token in zip(active, next_tokens(model, rows), strict=True):
                written[number] += (token,)
            left = [n for n in active if len(written[n]) < limits[n] and not is_done(n, written[n])]
            progress(len(active) - len(left))
            active = left
    return written


def next_tokens(model: LanguageModel, rows: Sequence[Tokens]) -> list[int]:
    """The likeliest next token of each row."""
    hidden_BSD = model.hidden(pad(rows, model))
    last_BD = torch.stack([hidden_BSD[b, len(row) - 1] for b, row in enumerate(rows)])
    return model.head(last_BD).argmax(-1).tolist()


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of rows of similar length, the longest first, as many as stay within the budget when padded."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first = 0
    while first < len(order):
        count = max(1, batch_tokens // lengths[order[first]])
        yield order[first : first + count]
        first += count


def pad(rows: Sequence[Tokens], model: LanguageModel) -> Tensor:
    """Token ids (B, S), padded on the right: a causal model looks back alone, so no mask is needed."""
    return padded(rows, 0, model.device)
