"""Give an image one of several classes: a ViT's training and finetuning."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.model import VitConfig
from tokendrop.config.task import ImageClassification
from tokendrop.errors import UserError
from tokendrop.models.batch import ImageBatch
from tokendrop.models.build import build_vit
from tokendrop.models.vit import Vit
from tokendrop.tasks.rows import RowData
from tokendrop.train.task import Loss

if TYPE_CHECKING:  # a model is built and timed without pyarrow, Pillow and torchvision
    from tokendrop.data.read.images import ImageReader


class ImageClassificationTask:
    """`Task` of a ViT; a sample is an image with its label."""

    may_be_new = ()

    def __init__(self, config: ExperimentConfig) -> None:
        assert isinstance(config.model, VitConfig)
        assert isinstance(config.task, ImageClassification)
        self.config, self.model_config, self.form = config, config.model, config.task
        self.are_new = ("head.",) if config.model.new_head else ()

    def build_model(self, *, seed: int) -> Vit:
        return build_vit(self.model_config, seed=seed)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return _vit(model).blocks

    def open(self, shards: Path, *, tokenizer: Path | None = None) -> "ImageData":
        return ImageData(self.config, shards)

    def random_batch(self, size: int, device: torch.device) -> ImageBatch:
        config = self.model_config
        return ImageBatch(
            pixels_BCYX=torch.randn(size, 3, config.image_size, config.image_size, device=device),
            labels_B=torch.randint(config.classes, (size,), device=device),
            sample_ids_B=torch.arange(size),
            special_BS=_class_token(size, config.sequence_length),
        )

    def loss(self, model: nn.Module, batch: ImageBatch) -> Loss:
        loss = model(batch.pixels_BCYX, batch.labels_B)
        if torch.is_grad_enabled():
            return Loss(loss.mean)
        likely_BK = loss.logits_BK.topk(min(5, loss.logits_BK.shape[1])).indices
        hits_BK = likely_BK == batch.labels_B[:, None]
        images = torch.full_like(batch.labels_B[0], len(hits_BK))
        figures = {"top1": (hits_BK[:, 0].sum(), images), "top5": (hits_BK.sum(), images)}
        return Loss(loss.mean, figures=figures)

    def language_model(self, model: nn.Module) -> NoReturn:
        raise UserError("want a model that predicts the next token; a ViT classifies images")

    def export(self, model: nn.Module, tokenizer: Any, to: Path) -> str:
        from tokendrop.data.read.images import MIDDLE
        from tokendrop.data.tokenizer import labels_of
        from tokendrop.models.pretrained_vit import save_as_timm

        labels, mean, std = labels_of(tokenizer), self.form.mean, self.form.std
        save_as_timm(
            _vit(model), to, labels=labels, mean=mean, std=std, crop=MIDDLE if self.form.crop == "resized" else None
        )
        return "timm.create_model('local-dir:FOLDER', pretrained=True)"


class ImageData(RowData):
    """`TaskData` of labelled images."""

    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> ImageBatch:
        from tokendrop.data.read.image_rows import read_image_rows
        from tokendrop.data.shards.format import SPLITS

        found = read_image_rows(rows_BT)
        contents = self.rows(SPLITS[found.split]).image_files(ids_B, found.checksums_B)
        is_training = SPLITS[found.split] == "train"
        pixels_BCYX = self._reader.training(contents, ids_B) if is_training else self._reader.held_out(contents)
        return ImageBatch(
            pixels_BCYX=pixels_BCYX,
            labels_B=torch.from_numpy(found.labels_B),
            sample_ids_B=torch.from_numpy(ids_B),
            special_BS=_class_token(len(ids_B), self.config.model.sequence_length),
            numbers=(number,),
        )

    @cached_property
    def _reader(self) -> "ImageReader":
        from tokendrop.data.read.images import ImageReader

        config, form = self.config, self.config.task
        assert isinstance(form, ImageClassification)
        assert isinstance(config.model, VitConfig)
        return ImageReader(
            size=config.model.image_size,
            crop=form.crop,
            augment=form.augment,
            mean=form.mean,
            std=form.std,
            seed=config.seed,
            threads=config.scaling.cpus_per_worker,
        )


def _class_token(images: int, tokens: int) -> Tensor:
    """Which tokens are [CLS], (B, S)."""
    special_BS = torch.zeros(images, tokens, dtype=torch.bool)
    special_BS[:, 0] = True
    return special_BS


def _vit(model: nn.Module) -> Vit:
    assert isinstance(model, Vit)
    return model
