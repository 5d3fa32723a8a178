"""Text that a causal language model writes, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokendrop.data.tokenizer import end_of_text
from tokendrop.evaluate.load import load_run
from tokendrop.evaluate.scoring import LanguageModel
from tokendrop.train.device import pick_device

# Dimensions: V vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """By which logits are divided; 0 for the likeliest token always."""
    top_k: int | None = None
    """Only the so many likeliest tokens."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability (Holtzman et al. 2020, arXiv:1904.09751)."""


class Writer:
    """Goes on with texts by the model of a run."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: a run folder, for its newest checkpoint, or a checkpoint.
        Raises:
            UserError: there is none, or its model does not predict the next token.
        """
        model, self.tokenizer, task = load_run(path)
        self.model: LanguageModel = task.language_model(model.to(pick_device()))
        self.end = end_of_text(self.tokenizer)

    def write(self, prompt: str, *, tokens: int, sampling: Sampling, seed: int) -> str:
        """What follows a text, as the begin of a document: so many tokens, or fewer where the document ends."""
        context = [self.end, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
        written: list[int] = []
        for token in sample(self.model, context, sampling, seed=seed):
            if token == self.end or len(written) == tokens:
                break
            written.append(token)
        return self.tokenizer.decode(written, skip_special_tokens=False)


@torch.inference_mode()
def sample(model: LanguageModel, context: list[int], sampling: Sampling, *, seed: int) -> Iterator[int]:
    """Tokens after a context, without end: a function of its arguments.

    The model reads as many of the last tokens as it takes, and keeps no keys and values: each token costs a forward
    pass.

    Args:
        context: at least one token.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = [*context]
    while True:
        hidden_1SD = model.hidden(torch.tensor([tokens[-model.sequence_length :]], device=model.device))
        tokens.append(choose(model.head(hidden_1SD[0, -1:])[0].cpu(), sampling, generator))
        yield tokens[-1]


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = probabilities(logits_V, sampling)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """How likely each token is to be drawn, float64 (V), at a temperature above 0."""
    logits_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None:
        least = logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, tokens = logits_V.softmax(0).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        before[0] = -1  # the likeliest token always stays
        logits_V = logits_V.index_fill(0, tokens[before >= sampling.top_p], -torch.inf)
    return logits_V.softmax(0)
