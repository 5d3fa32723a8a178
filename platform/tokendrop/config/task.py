"""What is trained: how a job becomes a model, batches and a loss."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from tokendrop.config.data import SPECIAL_TOKENS, DataKind
from tokendrop.config.plugin import import_class
from tokendrop.errors import UserError

Preset = dict[str, Any]
Metric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearman"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(ABC):
    """What every task has; one of the user's own is a dataclass below this one, with keys of its own."""

    reads: ClassVar[DataKind] = "text"
    """How its samples are made of a corpus."""
    has_token_losses: ClassVar[bool] = True
    """Whether there is a loss of each token, which some methods of dropping want."""
    special_tokens: ClassVar[int] = 0
    """Of a sequence, those that `drop.keep_special_tokens` keeps in every layer."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Of labelled examples, those that are read; the label is the last."""
        return ()

    @property
    def outputs(self) -> int | None:
        """Numbers that the model's head gives for a sample, where the task says how many."""
        return None

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of the model's length that one sample has, each of which the plan counts."""
        return 1

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

    def check(self, config: Any) -> None:
        """Raises ValueError where another branch of the whole job does not fit; the message names the key."""
        drop = config.drop
        if not self.has_token_losses and (drop.cuts or drop.by_token_loss):
            raise ValueError(f"drop.method: '{drop.method}' wants a task with a loss of each token, not '{self.kind}'")

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
    special_tokens = SPECIAL_TOKENS

    kind: Literal["masked_lm"] = "masked_lm"

    def check(self, config: Any) -> None:
        super(MaskedLm, self).check(config)
        if getattr(config.model, "new_head", False):
            raise ValueError("model.new_head: want a task that classifies, not 'masked_lm'")

    def head_tokens(self, config: Any) -> int | None:
        return config.data.pairs.most_labels(config.model.sequence_length)


def _kind(task: type[TaskConfig]) -> str:
    (kind,) = (str(field.default) for field in fields(task) if field.name == "kind")
    return kind


def _glue(*texts: str, labels: tuple[str, ...] = ("0", "1"), metrics: tuple[str, ...] = ("accuracy",)) -> Preset:
    return {"texts": [*texts], "labels": [*labels], "metrics": [*metrics]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassification(_BuiltInTask):
    """Give a text, or a pair of them, one of several labels or a number; or choose one of several answers."""

    IMPLEMENTATION = "tokendrop.tasks.text_classification:TextClassificationTask"
    model_kind = "bert"
    reads = "examples"
    has_token_losses = False
    # GLUE (Wang et al. 2019, arXiv:1804.07461) and RACE (Lai et al. 2017, arXiv:1704.04683), by the columns of
    # nyu-mll/glue and ehovy/race
    PRESETS: ClassVar[dict[str, Preset]] = {
        "mnli": _glue("premise", "hypothesis", labels=("0", "1", "2")),
        "qqp": _glue("question1", "question2", metrics=("accuracy", "f1")),
        "qnli": _glue("question", "sentence"),
        "sst2": _glue("sentence"),
        "rte": _glue("sentence1", "sentence2"),
        "mrpc": _glue("sentence1", "sentence2", metrics=("accuracy", "f1")),
        "cola": _glue("sentence", metrics=("matthews_correlation",)),
        "stsb": _glue("sentence1", "sentence2", labels=(), metrics=("pearson", "spearman")),
        "race": {"texts": ["article", "question"], "choices": ["options"], "label": "answer", "labels": [*"ABCD"]},
    }

    kind: Literal["text_classification"] = "text_classification"
    preset: str | None = None
    """A task of GLUE, or RACE; keys given beside it win."""
    texts: tuple[str, ...]
    """The columns of a text, or of two."""
    choices: tuple[str, ...] = ()
    """The columns of the answers to choose from, or one that has a list of them; each is put behind the texts, as
    a sequence of its own."""
    label: str = "label"
    """The column of the label."""
    labels: tuple[str, ...] = ()
    """Its values, in their order; without them it is a number from 0 to 60."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    """What `tokendrop evaluate` gives, as scikit-learn and scipy define it."""

    def __post_init__(self) -> None:
        if len(self.texts) not in (1, 2):
            raise ValueError(f"texts: want one column or two, got {len(self.texts)}")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"labels: want several that differ, or none where they are numbers, got {self.labels}")
        if self.choices and (not self.labels or len(self.choices) not in (1, len(self.labels))):
            raise ValueError(
                f"choices: want a column for each of {len(self.labels)} labels, or one, got {len(self.choices)}"
            )
        of_numbers = {"pearson", "spearman"}
        if any((metric in of_numbers) == bool(self.labels) for metric in self.metrics):
            raise ValueError(f"metrics: want those of {'labels' if self.labels else 'numbers'}, got {self.metrics}")
        if "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"metrics: f1 wants two labels, got {len(self.labels)}")

    @property
    def columns(self) -> tuple[str, ...]:
        return *self.texts, *self.choices, self.label

    @property
    def outputs(self) -> int:
        return 1 if self.choices else len(self.labels) or 1

    @property
    def sequences_per_sample(self) -> int:
        return len(self.labels) if self.choices else 1

    def check(self, config: Any) -> None:
        super(TextClassification, self).check(config)
        if self.choices and config.drop.method != "none":
            raise ValueError(f"drop.method: choices are learned at full length, want none, got '{config.drop.method}'")

    def head_tokens(self, config: Any) -> int | None:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassification(_BuiltInTask):
    """Give an image one of several classes."""

    IMPLEMENTATION = "tokendrop.tasks.image_classification:ImageClassificationTask"
    model_kind = "vit"
    reads = "images"
    has_token_losses = False
    special_tokens = 1

    kind: Literal["image_classification"] = "image_classification"
    image: str = "image"
    """The column of the encoded image: bytes, or as Hugging Face's data sets a struct of `bytes` and `path`; of a .tar
    the ending of its file, or any that images have."""
    label: str = "label"
    """The column of the label; of a .tar the ending of its file, or `cls`."""
    labels: tuple[str, ...] = ()
    """The classes in their order. Without them they are numbers from 0, and of an image folder its folders by name."""
    crop: Literal["none", "padded", "resized"] = "none"
    """How a training image is cut, then mirrored or not: padded by an eighth on all sides and cut to its size again, as
    for CIFAR; or a random part of 8% to 100%, as for ImageNet, where held-out images are cut to their middle."""
    augment: Literal["none", "rand_augment"] = "none"
    """What else is done to it: RandAugment (Cubuk et al. 2019, arXiv:1909.13719), two operations of strength 9."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Of red, green and blue, from 0 to 1, which images are normalized by."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(0 <= value <= 1 for value in values):
                raise ValueError(f"{key}: want three numbers from 0 to 1, got {list(values)}")
        if not all(self.std):
            raise ValueError(f"std: want numbers above 0, got {list(self.std)}")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels: want classes that differ, got {', '.join(self.labels)[:80]}")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.image, self.label

    def check(self, config: Any) -> None:
        super(ImageClassification, self).check(config)
        classes = getattr(config.model, "classes", len(self.labels))
        if self.labels and len(self.labels) != classes:
            raise ValueError(f"model.classes: task.labels has {len(self.labels)}, the model {classes}; want the same")

    def head_tokens(self, config: Any) -> int | None:
        return 1


AnyTask = CausalLm | MaskedLm | TextClassification | ImageClassification | TaskConfig
"""All tasks; `TaskConfig` stands for those of the user's own."""


def perplexity(loss: float) -> float:
    """Of a loss in nats per token; infinite where it is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
