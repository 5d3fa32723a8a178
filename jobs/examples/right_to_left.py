"""A task of one's own: a language model that reads from right to left and predicts the token before."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.task import TaskConfig, perplexity
from tokendrop.errors import UserError
from tokendrop.models.batch import TextBatch
from tokendrop.tasks.causal_lm import CausalLmTask, TextData


class RightToLeftData(TextData):
    """The rows of a causal language model, turned round."""

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> TextBatch:
        return super().batch(ids_B, rows_BT[:, ::-1].copy(), number)


class RightToLeftTask(CausalLmTask):
    """A causal language model of such rows."""

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> RightToLeftData:
        return RightToLeftData(self.config, shards)

    def language_model(self, model: nn.Module) -> NoReturn:
        raise UserError("this model reads from right to left, and lm-eval's tasks from left to right")

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> NoReturn:
        raise UserError("this model reads from right to left, which nobody expects of a GPT-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class RightToLeft(TaskConfig):
    """What a job says of it: the `task` branch."""

    def build(self, config: ExperimentConfig) -> RightToLeftTask:
        return RightToLeftTask(config)

    def figures(self, val_loss: float, measured: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(val_loss)}
