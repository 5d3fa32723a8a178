"""`tokendrop evaluate` gives the loss that training gave."""

import numpy as np
import pytest
import torch

from folders import Document, write_folder
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.data.tokenizer import train_tokenizer
from tokendrop.evaluate import held_out
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.launch.worker import run_worker
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.journal import read_steps
from tokendrop.track.run_folder import describe_run

LENGTH, VOCABULARY, HELD_OUT = 16, 512, 11
EXACT = 1e-12  # float64


def job(micro_batch: int, precision: str) -> ExperimentConfig:
    model = {"kind": "gpt", "layers": 3, "width": 16, "heads": 2, "sequence_length": LENGTH, "vocab_size": VOCABULARY}
    tree = {
        "name": "tiny",
        "model": model,
        "data": {"corpus": ["python"]},
        "train": {"length": "3 steps", "global_batch": 12, "micro_batch": micro_batch, "peak_lr": 0.1},
        "drop": {"method": "random_ltd", "schedule": {"kind": "constant", "kept": 4}},
        "evaluate": {"every": "3 steps"},
        "track": {"uri": None},
        "scaling": {"cpus_per_worker": 1},
    }
    tree["train"]["precision"] = precision
    return build(ExperimentConfig, tree, "")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    splits = ["train"] * 40 + ["validation"] * HELD_OUT
    documents = [Document(rng.integers(0, VOCABULARY, LENGTH + 1).tolist(), split=split) for split in splits]
    tokenizer = train_tokenizer(iter(["a stone under the river"] * 9), vocab_size=VOCABULARY).to_str()
    sizes = {"sequence_length": LENGTH, "vocab_size": VOCABULARY, "rows_per_shard": 64}
    write_folder(folder, [("corpus", documents)], tokenizer=tokenizer, **sizes)
    return folder


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", EXACT), ("fp32", 1e-6)])
def test_evaluate_gives_the_last_loss_of_training_whatever_its_micro_batch(
    tmp_path, data, monkeypatch, precision, tolerance
):
    monkeypatch.setattr(held_out, "pick_device", lambda: torch.device("cpu"))  # where it trains too
    found = []
    for micro_batch in (4, 12):
        config, run = job(micro_batch, precision), tmp_path / str(micro_batch)
        run.mkdir()
        describe_run(run, config, data)
        run_worker(WorkerSpec(config=config, run=run, data=data))
        result = held_out_figures(run)
        assert result["rows"] == HELD_OUT
        assert result["val_loss"] == read_steps(run)[-1]["val_loss"]
        found.append(result["val_loss"])
    assert found == pytest.approx([found[0]] * 2, rel=tolerance)
