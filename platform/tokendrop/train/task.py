"""What is trained: the loop, its engines, evaluation and benchmarks know no more of it than this."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tokendrop.models.batch import Batch, HeldOut, Samples


@dataclass(frozen=True, slots=True)
class Loss:
    """What a forward pass came to."""

    mean: Tensor
    """What is minimised: a scalar, the mean over the micro batch."""
    token_losses_BS: Tensor | None = None
    """The loss of each label, detached; None where labels are not of tokens."""
    outputs: Tensor | None = None
    """What the model says of each sample, (B, ...), where the task judges all of them at once; detached."""
    figures: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    """What else people read of held-out rows, by name: a sum, and of how many; empty where gradients are wanted."""


LossFunction = Callable[[nn.Module, Batch], Loss]
"""Of a model, or of what a strategy has wrapped it into, and a micro batch."""


class TaskData(Protocol):
    """A task's samples in a folder of token shards."""

    @property
    def samples(self) -> Samples:
        """Training samples by their places in the run."""
        ...

    def held_out(self, split: Literal["validation", "test"] = "validation") -> HeldOut:
        """The held-out samples that are read: their ids and rows; none where none were held out for tests."""
        ...

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> Batch:
        """A micro batch on the host, a function of its samples alone.

        Args:
            ids_B: sample ids.
            rows_BT: their rows, as `samples` and `held_out` give them.
            number: of the micro batch within its global batch.
        """
        ...

    def judge(
        self, split: Literal["validation", "test"], loss: float, outputs: Tensor | None, tokenizer: Any
    ) -> dict[str, float]:
        """Figures that want all held-out samples of a split at once, or their text; beside those of `Loss`.

        Args:
            loss: over them.
            outputs: those of `Loss`, (N, ...).
            tokenizer: a `tokenizers.Tokenizer`.
        """
        ...


class Task(Protocol):
    """How a job becomes a model, batches, a loss and an export; made by `config.task.build(config)`."""

    may_be_new: Sequence[str]
    """How the names of those parameters begin that keep random weights where `model.init_from` has none."""
    are_new: Sequence[str]
    """How the names of those begin that keep them whatever it has."""

    def build_model(self, *, seed: int) -> nn.Module:
        """The model with the weights that training begins with, the same on every rank for one seed.

        Its parameters' names are those of its checkpoints. Layers that `train.activation_checkpointing` is to reach are
        a `tokendrop.models.layer.Layer`.
        """
        ...

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The layers in order, as `drop` and the plan number them."""
        ...

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> TaskData:
        """What there is to train on and to validate on; the manifest is read once for both, when first asked.

        Args:
            tokenizer: where it lies, for workers that do not see the folder of the shards; beside them if left out.
        Raises:
            UserError: this is no folder of token shards.
        """
        ...

    def random_batch(self, size: int, device: torch.device) -> Batch:
        """A micro batch of random content, for measurements."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss of a micro batch, by a forward pass of the model or of a wrapper of it."""
        ...

    def language_model(self, model: nn.Module) -> Any:
        """The model as lm-eval's tasks need it: a `tokendrop.evaluate.scoring.LanguageModel`.

        Raises:
            UserError: it is none.
        """
        ...

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> str:
        """Write the model into a folder in the ecosystem's own format; returns the expression that reads `FOLDER`.

        Raises:
            UserError: that format has no such model.
        """
        ...
