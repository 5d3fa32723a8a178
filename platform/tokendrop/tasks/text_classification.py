"""Label texts or pairs of texts, give them a number, or choose an answer: BERT's finetuning."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.model import BertConfig
from tokendrop.config.task import Metric, TextClassification
from tokendrop.errors import UserError
from tokendrop.models.batch import ExampleBatch
from tokendrop.models.bert import BertClassifier
from tokendrop.models.build import build_classifier
from tokendrop.tasks.rows import RowData
from tokendrop.train.task import Loss

if TYPE_CHECKING:  # a model is built and timed without pyarrow
    from tokendrop.data.shards.format import Split


class TextClassificationTask:
    """`Task` of a BERT with a head for examples; a sample is an example."""

    may_be_new = "pooler.", "classifier."

    def __init__(self, config: ExperimentConfig) -> None:
        assert isinstance(config.model, BertConfig)
        assert isinstance(config.task, TextClassification)
        self.config, self.model_config, self.form = config, config.model, config.task
        self.are_new = ("classifier.",) if config.model.new_head else ()

    def build_model(self, *, seed: int) -> BertClassifier:
        return build_classifier(self.model_config, outputs=self.form.outputs, seed=seed)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return _classifier(model).blocks

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> "ExampleData":
        return ExampleData(self.config, shards)

    def random_batch(self, size: int, device: torch.device) -> ExampleBatch:
        shape = size, self.form.sequences_per_sample, self.model_config.sequence_length
        tokens_BCS = torch.randint(self.model_config.vocab_size, shape, device=device)
        dtype = torch.int64 if self.form.labels else torch.float64
        return ExampleBatch(
            input_ids_BCS=tokens_BCS,
            token_types_BCS=torch.zeros_like(tokens_BCS),
            attention_mask_BCS=torch.ones_like(tokens_BCS, dtype=torch.bool),
            labels_B=torch.zeros(size, dtype=dtype, device=device),
            sample_ids_B=torch.arange(size),
        )

    def loss(self, model: nn.Module, batch: ExampleBatch) -> Loss:
        loss = model(batch)
        if torch.is_grad_enabled():
            return Loss(loss.mean)
        figures: dict[str, tuple[Tensor, Tensor]] = {}
        if self.form.labels:
            hits_B = loss.outputs_BO.argmax(1) == batch.labels_B
            figures["accuracy"] = hits_B.sum(), torch.full_like(batch.labels_B[0], len(hits_B))
        return Loss(loss.mean, outputs=loss.outputs_BO, figures=figures)

    def language_model(self, model: nn.Module) -> NoReturn:
        raise UserError("want a model that predicts the next token; this one classifies")

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> str:
        from tokendrop.data.tokenizer import pair_vocabulary
        from tokendrop.models.pretrained_bert import as_classifier

        pad, has_choices = pair_vocabulary(tokenizer).pad, bool(self.form.choices)
        as_classifier(_classifier(model), pad, labels=self.form.labels, choices=has_choices).save_pretrained(to)
        kind = "MultipleChoice" if has_choices else "SequenceClassification"
        return f"AutoModelFor{kind}.from_pretrained('FOLDER')"


class ExampleData(RowData):
    """`TaskData` of labelled examples."""

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> ExampleBatch:
        assert isinstance(self.config.task, TextClassification)
        length = self.config.model.sequence_length
        return example_batch(ids_B, rows_BT, number, form=self.config.task, length=length)

    def judge(self, split: "Split", loss: float, outputs: Tensor | None, tokenizer: Any) -> dict[str, float]:
        assert isinstance(self.config.task, TextClassification)
        assert outputs is not None
        labels_N = self.batch(*self.held_out(split), 0).labels_B
        found_N = outputs.argmax(1) if self.config.task.labels else outputs[:, 0]
        return {one: score(one, labels_N.numpy(), found_N.double().numpy()) for one in self.config.task.metrics}


def example_batch(
    ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int, *, form: TextClassification, length: int
) -> ExampleBatch:
    """Of rows of examples.

    Args:
        length: tokens of a row's sequence.
    """
    from tokendrop.data.read.example_rows import label_as_number, read_examples

    examples = read_examples(rows_BT, length)
    labels_B = examples.labels_B if form.labels else label_as_number(examples.labels_B)
    return ExampleBatch(
        input_ids_BCS=torch.from_numpy(examples.input_ids_BCS),
        token_types_BCS=torch.from_numpy(examples.token_types_BCS),
        attention_mask_BCS=torch.from_numpy(examples.attention_mask_BCS),
        labels_B=torch.from_numpy(labels_B),
        sample_ids_B=torch.from_numpy(ids_B),
        numbers=(number,),
    )


def _classifier(model: nn.Module) -> BertClassifier:
    assert isinstance(model, BertClassifier)
    return model


def score(metric: Metric, labels_N: NDArray[Any], found_N: NDArray[Any]) -> float:
    """A metric by the definition of scikit-learn, or of scipy for numbers: NaN where they do not differ."""
    if metric in ("pearson", "spearman"):
        from scipy import stats

        if len(labels_N) < 2:
            return math.nan
        return float(getattr(stats, f"{metric}r")(labels_N, found_N).statistic)
    from sklearn import metrics

    names = {"accuracy": "accuracy_score", "f1": "f1_score", "matthews_correlation": "matthews_corrcoef"}
    return float(getattr(metrics, names[metric])(labels_N, found_N))
