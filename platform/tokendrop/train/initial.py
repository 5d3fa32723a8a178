"""The weights that a job begins with where they are not random: `model.init_from`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokendrop.config.model import ModelConfig
from tokendrop.errors import UserError
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, check_complete, is_checkpoint, latest_checkpoint
from tokendrop.train.reader import CheckpointReader, load_into

_WHERE_FROM = ("preset", "init_from", "dropout", "new_head")
"""Keys of a model that say nothing of its weights."""
_MODEL = "model."


class InitialWeights(Protocol):
    """A trained model."""

    place: str

    @property
    def tokenizer(self) -> str | None:
        """The path of its tokenizer; None where it has none."""
        ...

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Keys of `model` in a job, and their values there, `classes` also of a BERT that classifies.

        Raises:
            UserError: it has something that ours have not.
        """
        ...

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of our parameters that the model has, by name."""
        ...


class CheckpointWeights:
    """Weights of a checkpoint of ours."""

    def __init__(self, path: Path, group: Any = None) -> None:
        """
        Args:
            path: a run folder, for its newest whole checkpoint, or a checkpoint, of which what is read is checked.
            group: of all ranks, which read it together; None for one process alone.
        Raises:
            UserError: there is no checkpoint.
            DamagedDataError: it is damaged.
        """
        self.checkpoint = path.absolute()
        if _has_checkpoints(path):
            self.checkpoint = latest_checkpoint(self.checkpoint)
        check_complete(self.checkpoint)
        self.place = str(self.checkpoint)
        self._reader = CheckpointReader(self.checkpoint, group)

    @property
    def tokenizer(self) -> str | None:
        path = self.checkpoint.parent.parent / "tokenizer.json"
        return str(path) if path.is_file() else None

    @property
    def sizes(self) -> dict[str, Any]:
        found = {key: value for key, value in self._reader.meta["model"].items() if key not in _WHERE_FROM}
        head = self._reader.metadata.state_dict_metadata.get(_MODEL + "classifier.weight")
        return found if head is None else {**found, "classes": head.size[0]}  # pyright: ignore[reportAttributeAccessIssue]

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = self._reader.metadata.state_dict_metadata
        wanted = [name for name in names if _MODEL + name in tensors]
        found = {name: _empty_like(tensors[_MODEL + name]) for name in wanted}
        load_into({"model": found}, self._reader)
        return found


def find_initial(place: str, kind: str, group: Any = None) -> InitialWeights:
    """What `model.init_from` means.

    Args:
        kind: of the job's model.
        group: of all ranks, where they read a checkpoint of ours together.
    Raises:
        UserError: there is nothing, or a model of a family that we have not.
        DamagedDataError: it is a damaged checkpoint.
    """
    path = Path(place).expanduser()
    if (path / META).is_file() or is_checkpoint(path) or _has_checkpoints(path):
        return CheckpointWeights(path, group)
    is_vit = kind == "vit"
    try:
        if is_vit:
            from tokendrop.models.pretrained_vit import TimmWeights as Weights
        else:
            from tokendrop.models.hugging_face import HuggingFaceWeights as Weights
    except ModuleNotFoundError as error:
        whose, extra = ("timm", "vision") if is_vit else ("Hugging Face", "eval")
        raise UserError(
            f"model.init_from: {place}: want a run or a checkpoint, or for models of {whose}:"
            f" pip install 'tokendrop[{extra}]' ({error.name} is missing)"
        ) from None
    return Weights(str(path) if path.exists() else place)


def check_sizes(config: ModelConfig, source: InitialWeights, *, outputs: int | None = None) -> None:
    """Raises UserError where a job's model is not the one that it is to begin with the weights of.

    Args:
        outputs: of the head, where the job's task and not its model says how many.
    """
    wanted = asdict(config)
    for key, value in sorted(source.sizes.items(), key=lambda one: one[0] != "kind"):
        where, want = f"model.{key}", str(value)
        if key == "classes":
            if "classes" not in wanted:
                where = "task.labels"
            has, want = wanted.get("classes", outputs), f"{value}, or model.new_head=true"
            fits = has in (None, value) or wanted.get("new_head")
        elif key == "sequence_length":
            has, want = wanted[key], f"at most {value}"
            fits = has <= value
        else:
            has = wanted.get(key)
            fits = has == value
        if not fits:
            raise UserError(f"{where}: {source.place} has {value}, this job {has}; want {want}")


@torch.no_grad()
def begin_with(
    model: nn.Module, source: InitialWeights, *, may_be_new: Sequence[str], are_new: Sequence[str] = ()
) -> None:
    """Put the weights of a trained model into another one of its sizes.

    Args:
        may_be_new: how the names of those begin that keep their random weights where the source has none.
        are_new: of those that keep them whatever it has.
    Raises:
        UserError: the source has none of another name, or some of other sizes.
    """
    parameters = {name: one for name, one in model.named_parameters() if not name.startswith((*are_new,))}
    weights = source.weights(parameters)
    for name, parameter in parameters.items():
        if name not in weights:
            if name.startswith(tuple(may_be_new)):
                continue
            raise UserError(f"model.init_from: {source.place} has no {name}; want a model with the same heads")
        found = weights[name][: len(parameter)] if name == "positions.weight" else weights[name]
        if found.shape != parameter.shape:
            sizes = f"{tuple(found.shape)}, this job's {tuple(parameter.shape)}"
            raise UserError(f"model.init_from: {name} of {source.place} is of size {sizes}")
        parameter.copy_(found)


def _has_checkpoints(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir()


def _empty_like(tensor: Any) -> Tensor:
    return torch.empty(tensor.size, dtype=tensor.properties.dtype)
