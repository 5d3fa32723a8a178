"""Predict masked tokens, and whether two sentences follow each other: BERT's pretraining."""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.model import BertConfig
from tokendrop.errors import UserError
from tokendrop.models.batch import BertBatch, HeldOut, Samples
from tokendrop.models.bert import Bert
from tokendrop.models.build import build_bert
from tokendrop.tasks.rows import RowData
from tokendrop.train.task import Loss

if TYPE_CHECKING:  # a model is built and timed without pyarrow
    from tokendrop.data.read.pairs import PairMaker
    from tokendrop.data.shards.format import Split


class MaskedLmTask:
    """`Task` of a BERT; a sample is a pair of neighbouring runs of sentences."""

    may_be_new = are_new = ()

    def __init__(self, config: ExperimentConfig) -> None:
        assert isinstance(config.model, BertConfig)
        self.config, self.model_config, self.pairs = config, config.model, config.data.pairs

    def build_model(self, *, seed: int) -> Bert:
        return build_bert(
            self.model_config,
            sentence_head=self.pairs.sentence_task != "none",
            most_labels=self.pairs.most_labels(self.model_config.sequence_length),
            seed=seed,
        )

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return _bert(model).blocks

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> "PairData":
        return PairData(self.config, shards, tokenizer)

    def random_batch(self, size: int, device: torch.device) -> BertBatch:
        length = self.model_config.sequence_length
        tokens_BS = torch.randint(self.model_config.vocab_size, (size, length), device=device)
        labels_BS = torch.full_like(tokens_BS, -100)
        labels_BS[:, : self.pairs.most_labels(length)] = 0
        return BertBatch(
            input_ids_BS=tokens_BS,
            labels_BS=labels_BS,
            token_types_BS=torch.zeros_like(tokens_BS),
            attention_mask_BS=torch.ones_like(tokens_BS, dtype=torch.bool),
            sentence_labels_B=torch.zeros(size, dtype=torch.int64, device=device),
            sample_ids_B=torch.arange(size),
        )

    def loss(self, model: nn.Module, batch: BertBatch) -> Loss:
        loss = model(batch)
        if torch.is_grad_enabled():
            return Loss(loss.mean, loss.token_losses_BS)
        tokens = loss.masked_tokens
        figures = {"mlm_loss": (loss.token_losses_BS.sum(), tokens), "mlm_accuracy": (loss.token_hits, tokens)}
        if loss.sentence_hits is not None:
            pairs = torch.full_like(tokens, len(batch.labels_BS))
            figures[f"{self.pairs.sentence_task}_accuracy"] = (loss.sentence_hits, pairs)
        return Loss(loss.mean, loss.token_losses_BS, figures=figures)

    def language_model(self, model: nn.Module) -> NoReturn:
        raise UserError("want a model that predicts the next token; a BERT predicts masked ones")

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> str:
        from tokendrop.data.tokenizer import pair_vocabulary
        from tokendrop.models.pretrained_bert import as_bert

        as_bert(_bert(model), pair_vocabulary(tokenizer).pad).save_pretrained(to)
        kind = "MaskedLM" if self.pairs.sentence_task == "none" else "PreTraining"
        return f"AutoModelFor{kind}.from_pretrained('FOLDER')"


class PairData(RowData):
    """`TaskData` of pairs of sentences."""

    def __init__(self, config: ExperimentConfig, shards: Path, tokenizer: Path | None) -> None:
        from tokendrop.data.shards.format import TOKENIZER

        super().__init__(config, shards)
        self.tokenizer = tokenizer or shards / TOKENIZER

    @cached_property
    def samples(self) -> Samples:
        from tokendrop.data.read.pairs import PairSamples

        return PairSamples(
            self.rows("train"),
            self.order,
            self.config.data.pairs,
            seed=self.config.seed,
            end=self.end,
            together=self.config.train.global_batch,
        )

    def held_out(self, split: "Split" = "validation") -> HeldOut:
        from tokendrop.data.read.pairs import held_out_pairs

        rows = self.rows(split)
        return held_out_pairs(rows, self.held_out_ids(rows), self.config.data.pairs, seed=self.config.seed)

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> BertBatch:
        return pair_batch(ids_B, rows_BT, number, pairs=self._pairs)

    @cached_property
    def _pairs(self) -> "PairMaker":
        from tokendrop.data.read.pairs import PairMaker
        from tokendrop.data.tokenizer import load_tokenizer, pair_vocabulary

        vocabulary = pair_vocabulary(load_tokenizer(self.tokenizer, "sentence_pairs"))
        length, seed = self.config.model.sequence_length, self.config.seed
        return PairMaker(self.config.data.pairs, vocabulary, sequence_length=length, seed=seed)


def pair_batch(ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int, *, pairs: "PairMaker") -> BertBatch:
    """Of pairs of sentences, masked; held-out rows are as `with_negative_segments` gives them where the task is NSP."""
    tensors = {name: torch.from_numpy(array) for name, array in asdict(pairs(ids_B, rows_BT)).items()}
    return BertBatch(**tensors, sample_ids_B=torch.from_numpy(ids_B), numbers=(number,))


def _bert(model: nn.Module) -> Bert:
    assert isinstance(model, Bert)
    return model
