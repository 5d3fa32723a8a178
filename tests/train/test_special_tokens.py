"""Tokens that stay in every layer where a job says so, and jobs that can not have them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from images import write_images
from pairs import LENGTH, texts, write_pairs
from task_jobs import LTD, images_job, job
from tiny import experiment
from tokendrop.config.load import build
from tokendrop.config.task import AnyTask
from tokendrop.errors import UserError
from tokendrop.train.worker import build_engine


def test_special_tokens_stay_where_they_are_to_stay(tmp_path: Path) -> None:
    write_pairs(tmp_path / "data", texts(60))
    config = job(drop__keep_special_tokens=True)
    _, dropping = build_engine(config, torch.device("cpu"))
    opened = config.task.build(config).open(tmp_path / "data")
    batch = opened.batch(*opened.samples.at(np.arange(4)), 0)
    assert batch.special_BS.sum(1).tolist() == [3] * 4
    assert batch.special_BS[:, 0].all()
    dropping.draw(kept_length=4, step=0, sample_ids=batch.sample_ids_B, sequence_length=LENGTH, always=batch.special_BS)
    assert batch.special_BS.gather(1, dropping.kept(1)).sum(1).tolist() == [3] * 4


def test_the_class_token_stays_where_it_is_to_stay(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 20)
    config = images_job(drop__keep_special_tokens=True)
    _, dropping = build_engine(config, torch.device("cpu"))
    opened = config.task.build(config).open(tmp_path / "data")
    batch = opened.batch(*opened.samples.at(np.arange(4)), 0)
    where = {"sample_ids": batch.sample_ids_B, "sequence_length": config.model.sequence_length}
    dropping.draw(kept_length=4, step=0, always=batch.special_BS, **where)
    assert (dropping.kept(1) == 0).sum(1).tolist() == [1] * 4


def test_special_tokens_are_refused_where_there_is_no_room_for_them() -> None:
    with pytest.raises(UserError, match=r"drop\.keep_special_tokens: .*kept lengths of at least 3.*kept length of 2"):
        job(drop__keep_special_tokens=True, drop__schedule={**LTD, "start": 2})
    with pytest.raises(UserError, match=r"drop\.keep_special_tokens: .*got a task of kind 'causal_lm'"):
        experiment(drop__keep_special_tokens=True)


@pytest.mark.parametrize(
    ("kind", "model"),
    [("masked_lm", "gpt"), ("causal_lm", "bert"), ("causal_lm", "vit"), ("image_classification", "gpt")],
)
def test_a_task_wants_its_own_kind_of_model(kind: str, model: str) -> None:
    own = {"gpt": experiment, "bert": job, "vit": images_job}[model]()
    task = build(AnyTask, {"kind": kind}, "task")
    config = replace(own, task=task, data=replace(own.data, tokenizer=None))
    fitting = {"gpt": "causal_lm", "bert": "masked_lm or text_classification", "vit": "image_classification"}[model]
    with pytest.raises(UserError, match=rf"^task\.kind: '{kind}' trains a model of .*, not '{model}'; want {fitting}$"):
        config.task.build(config)
