"""How often a ViT's likeliest class, and its five likeliest, are an image's: counted one image at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from images import MODEL, TASK
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.vit import Vit

IMAGES = 64
CPU = torch.device("cpu")


def job(classes: int) -> ExperimentConfig:
    return experiment(model={**MODEL, "classes": classes}, task=TASK, drop={"method": "none"})


def figures_of(classes: int, *, images: int, seed: int) -> tuple[dict[str, float], list[int]]:
    """A task's figures of random images, and at which place, from 0, the model has each one's class."""
    config = job(classes)
    task = config.task.build(config)
    model = task.build_model(seed=seed).eval()
    assert isinstance(model, Vit)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        batch = task.random_batch(images, CPU)
        torch.nn.init.normal_(model.head.weight)
        logits_BK = model.logits(batch.pixels_BCYX).tolist()
        figures = task.loss(model, batch).figures
    likeliest = [sorted(range(classes), key=lambda k, one=one: -one[k]) for one in logits_BK]
    places = [order.index(label) for order, label in zip(likeliest, batch.labels_B.tolist(), strict=True)]
    assert all(int(count) == images for _, count in figures.values())
    return {name: int(hits) / int(count) for name, (hits, count) in figures.items()}, places


@settings(max_examples=25)
@given(classes=st.integers(2, 12), images=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_top_1_and_top_5_are_the_shares_of_images_whose_class_is_at_such_a_place(
    classes: int, images: int, seed: int
) -> None:
    figures, places = figures_of(classes, images=images, seed=seed)
    assert figures == {
        "top1": pytest.approx(sum(place == 0 for place in places) / images),
        "top5": pytest.approx(sum(place < 5 for place in places) / images),
    }
    assert classes > 5 or figures["top5"] == 1.0


def test_of_ten_classes_five_are_not_all() -> None:
    figures, places = figures_of(10, images=IMAGES, seed=1)
    assert figures["top1"] < figures["top5"] < 1.0
    assert {4, 5} <= {*places}  # on either side of the fifth
