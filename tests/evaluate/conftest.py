"""A run of a tiny GPT with a checkpoint, made by hand, and the documents that the task files here read."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from folders import Document, write_folder
from tiny import loss_of
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.data.tokenizer import train_tokenizer
from tokendrop.models.build import build_model
from tokendrop.track.run_folder import describe_run
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizers

STEP, LENGTH, VALIDATION_ROWS = 7, 128, 5
WORDS = "the a river stone light under over old small grey bird sings falls stands runs to from was Ünïcode don't"

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    return _make_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint; its tests leave it as it is."""
    texts = [sentence(seed) for seed in range(200)]
    return _make_run(tmp_path_factory.mktemp("run"), train_tokenizer(iter(texts), vocab_size=512))


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the documents of tasks/*.yaml in it: short, long, and of one token each."""
    rows = []
    for seed in range(12):
        text = sentence(seed, words=200 if seed % 4 == 3 else 12)
        rows.append(
            {
                "text": text,
                "first": text.rsplit(" ", 1)[0],
                "last": text.rsplit(" ", 1)[1],
                "choices": ["a", "the", "a small bird sings", f"{sentence(seed + 100)}."],
                "answer": seed % 4,
            }
        )
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "documents.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=words))


def _make_run(folder: Path, tokenizer: Tokenizer, *, precision: str = "auto", **changes: object) -> Path:
    """A run folder below `folder`, with the token shards beside it.

    Args:
        changes: of the model.
    """
    run, data = folder / "run", folder / "data"
    run.mkdir()
    data.mkdir()
    vocab_size = tokenizer.get_vocab_size()
    config = experiment({"vocab_size": -(-vocab_size // 512) * 512, **changes}, precision)
    rows = np.random.default_rng(0).integers(0, vocab_size, (VALIDATION_ROWS, LENGTH + 1))
    write_folder(
        data,
        [("corpus", [Document(row, split="validation") for row in rows.tolist()])],
        sequence_length=LENGTH,
        tokenizer=tokenizer.to_str(),
        vocab_size=vocab_size,
        rows_per_shard=16 * VALIDATION_ROWS,
    )
    describe_run(run, config, data)
    save(config, run)
    return run


def experiment(model: dict[str, object], precision: str) -> ExperimentConfig:
    tree = {
        "name": "tiny",
        "model": {"kind": "gpt", "layers": 2, "width": 64, "heads": 4, "sequence_length": LENGTH, **model},
        "data": {"corpus": ["python"]},
        "train": {"length": "10 steps", "global_batch": 4, "micro_batch": 2, "peak_lr": 1e-3, "precision": precision},
        "track": {"uri": None},
    }
    return build(ExperimentConfig, tree, "")


def save(config: ExperimentConfig, run: Path) -> None:
    """Commit a checkpoint of a model whose logits are not flat and whose every parameter matters."""
    model = build_model(config.model, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=generator) / 10
            else:
                parameter *= 8
    engine = DdpEngine(model, build_optimizers(model, config.train), torch.float32, loss=loss_of)
    meta = {"model": asdict(config.model), "name": config.name}
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, meta=meta)
    checkpoints.save(engine, STEP)
    checkpoints.wait()
