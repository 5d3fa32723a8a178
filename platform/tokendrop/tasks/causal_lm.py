"""Predict the next token of documents that lie end to end."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.model import GptConfig
from tokendrop.config.task import perplexity
from tokendrop.models.batch import TextBatch
from tokendrop.models.build import build_model
from tokendrop.models.gpt import Gpt
from tokendrop.tasks.rows import RowData
from tokendrop.train.task import Loss

if TYPE_CHECKING:  # a model is built and timed without pyarrow
    from tokendrop.data.shards.format import Split


class CausalLmTask:
    """`Task` of a GPT; a sample is a row of S + 1 tokens, of which each token's label is the next."""

    may_be_new = are_new = ()

    def __init__(self, config: ExperimentConfig) -> None:
        assert isinstance(config.model, GptConfig)
        self.config, self.model_config = config, config.model

    def build_model(self, *, seed: int) -> Gpt:
        return build_model(self.model_config, seed=seed)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return _gpt(model).blocks

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> "TextData":
        return TextData(self.config, shards)

    def random_batch(self, size: int, device: torch.device) -> TextBatch:
        shape = size, self.model_config.sequence_length + 1
        tokens = torch.randint(self.model_config.vocab_size, shape, device=device)
        return TextBatch(input_ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], sample_ids_B=torch.arange(size))

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        return Loss(*model(batch.input_ids_BS, batch.labels_BS, token_losses=True))

    def language_model(self, model: nn.Module) -> Gpt:
        return _gpt(model)

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> str:
        from tokendrop.data.tokenizer import end_of_text
        from tokendrop.models.pretrained import as_gpt2

        as_gpt2(_gpt(model), end_of_text(tokenizer)).save_pretrained(to)
        return "AutoModelForCausalLM.from_pretrained('FOLDER')"


class TextData(RowData):
    """`TaskData` of rows of text."""

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> TextBatch:
        return text_batch(ids_B, rows_BT, number)

    def judge(self, split: "Split", loss: float, outputs: Tensor | None, tokenizer: Any) -> dict[str, float]:
        """Perplexity per word, by the white space between words (as lm-eval counts them) and the edges of documents."""
        from tokendrop.data.tokenizer import END_OF_TEXT

        ids_N, rows_NT = self.held_out(split)
        starts = [
            row * rows_NT.shape[1] + start
            for row, found in enumerate(self.rows(split).starts(ids_N))
            for start in found
        ]
        texts = tokenizer.decode_batch(np.split(rows_NT.flatten(), starts), skip_special_tokens=False)
        words = sum(len(text.replace(END_OF_TEXT, " ").split()) for text in texts)
        return {"word_perplexity": perplexity(loss * rows_NT.size / words) if words else math.inf}


def text_batch(ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> TextBatch:
    """Of rows of text: each token's label is the next."""
    tokens, ids = torch.from_numpy(rows_BT), torch.from_numpy(ids_B)
    return TextBatch(input_ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], sample_ids_B=ids, numbers=(number,))


def _gpt(model: nn.Module) -> Gpt:
    assert isinstance(model, Gpt)
    return model
