"""What is trained: how a job becomes a model, batches and a loss."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from tokendrop.config.data import DataKind
from tokendrop.config.plugin import import_class
from tokendrop.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(ABC):
    """What every task has; one of the user's own is a dataclass below this one, with keys of its own."""

    reads: ClassVar[DataKind] = "text"
    """How its samples are made of a corpus."""

    kind: str
    """The task's name, or where the user's own class is."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """The task of a job: a `tokendrop.train.task.Task`.

        Args:
            config: the whole job, an `ExperimentConfig`.
        Raises:
            UserError: the job has a model that this task doesn't train.
        """

    def figures(self, val_loss: float, measured: Mapping[str, float]) -> dict[str, float]:
        """What people read beside a validation loss, by name.

        Args:
            measured: what the task's losses had as figures: means over the held-out rows.
        """
        return dict(measured)

    def head_tokens(self, config: Any) -> int | None:
        """Tokens of each sequence that the model's head reads, for the plan's FLOPs; None for all of them.

        Args:
            config: the whole job.
        """
        return None


class _BuiltInTask(TaskConfig):
    """A task of tokendrop's own."""

    IMPLEMENTATION: ClassVar[str]
    """By name: configurations are read without torch."""
    model_kind: ClassVar[str]
    """Of the models that it trains."""

    def build(self, config: Any) -> Any:
        if config.model.kind != self.model_kind:
            kind = config.model.kind
            fitting = [_kind(one) for one in get_args(AnyTask) if getattr(one, "model_kind", None) == kind]
            raise UserError(
                f"task.kind: '{self.kind}' trains a model of kind {self.model_kind}, not '{kind}';"
                f" want {' or '.join(fitting)}"
            )
        return import_class(self.IMPLEMENTATION)(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLm(_BuiltInTask):
    """Predict the next token."""

    IMPLEMENTATION = "tokendrop.tasks.causal_lm:CausalLmTask"
    model_kind = "gpt"

    kind: Literal["causal_lm"] = "causal_lm"

    def figures(self, val_loss: float, measured: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(val_loss)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLm(_BuiltInTask):
    """Predict masked tokens, and whether two sentences follow each other (Devlin et al. 2019)."""

    IMPLEMENTATION = "tokendrop.tasks.masked_lm:MaskedLmTask"
    model_kind = "bert"
    reads = "sentence_pairs"

    kind: Literal["masked_lm"] = "masked_lm"

    def head_tokens(self, config: Any) -> int | None:
        return config.data.pairs.most_labels(config.model.sequence_length)


def _kind(task: type[TaskConfig]) -> str:
    (kind,) = (str(field.default) for field in fields(task) if field.name == "kind")
    return kind


AnyTask = CausalLm | MaskedLm | TaskConfig
"""All tasks; `TaskConfig` stands for those of the user's own."""


def perplexity(loss: float) -> float:
    """Of a loss in nats per token; infinite where it is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
