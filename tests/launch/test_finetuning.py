"""A GPT-2 of Hugging Face's, finetuned for some epochs on Ray: begun, resized, gone on with, judged."""

import json
import shutil
from collections import Counter
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from corpora import byte_tokenizer
from runs import FLOAT64, losses
from tokendrop.cli.main import main
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.track.audit import audit
from tokendrop.track.journal import read_ledger
from tokendrop.track.run_folder import open_run_folder

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

SIZES = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 320}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with its tokenizer, and three files of lines."""
    folder = tmp_path_factory.mktemp("finetuning")
    GPT2LMHeadModel(GPT2Config(**SIZES)).double().save_pretrained(folder / "gpt2")
    byte_tokenizer(folder / "gpt2" / "tokenizer.json")
    words = np.random.default_rng(0).integers(0, 50, size=(3, 90, 12))
    for name, lines in zip(("train", "valid", "test"), words, strict=True):
        (folder / f"{name}.txt").write_text("".join(" ".join(f"w{w}" for w in line) + "\n" for line in lines))
    return folder


def write_job(folder: Path, name: str) -> Path:
    tree = {
        "name": name,
        "run": name,
        "runs_folder": str(folder / "runs"),
        "model": {
            "kind": "gpt",
            **{"layers": 3, "width": 32, "heads": 2, "sequence_length": 32, "vocab_size": 320},
            "init_from": str(folder / "gpt2"),
        },
        "data": {
            "corpus": [str(folder / "train.txt")],
            "validation_corpus": [str(folder / "valid.txt")],
            "test_corpus": [str(folder / "test.txt")],
            **{"text_unit": "stripped_line", "end_of_text": False, "folder": str(folder / "data")},
        },
        "train": {
            **{"length": "3 epochs", "global_batch": 8, "micro_batch": 2, "peak_lr": 5e-3, "warmup": "0 steps"},
            **{"decay": "constant", "precision": "fp64"},
        },
        "drop": {
            "method": "random_ltd",
            "schedule": {"kind": "linear", "start": 8, "until": "2 epochs", "increment": 8},
        },
        "scaling": {"cpus_per_worker": 1},
        "checkpoint": {"every": "1 epoch"},
        "evaluate": {"every": "1 epoch", "sequences": 64},
        "track": {"uri": None},
    }
    job = folder / f"{name}.yaml"
    job.write_text(yaml.safe_dump(tree))
    return job


@pytest.fixture(scope="module")
def run(folder: Path, ray_cluster: None) -> Path:
    main(["train", str(write_job(folder, "whole"))])
    return folder / "runs" / "whole"


def test_its_length_is_that_of_the_epochs_and_each_sample_comes_once_in_each(run: Path) -> None:
    config, data = open_run_folder(run)
    (rows,) = read_manifest(data).committed("train").rows
    assert (config.data.epoch_samples, config.steps) == (rows, ceil(3 * rows / 8))
    trained = [sample for row in read_ledger(run) for sample in row["sample_ids"]]
    epochs = Counter(sample >> 36 for sample in trained)
    assert [epochs[number] for number in range(3)] == [rows] * 3
    assert max(Counter(trained).values()) == 1
    assert audit(run).is_clean


def test_it_begins_with_the_weights_and_learns(run: Path, folder: Path) -> None:
    """The first step's loss is that of random weights of a third the size, which are the folder's."""
    main(
        [
            "train",
            str(write_job(folder, "again")),
            f"model.init_from={run}",
            "train.length=1 steps",
            "scaling.workers=2",
        ]
    )
    assert losses(folder / "runs" / "again")[0] < losses(run)[0] - 0.5


def test_it_goes_on_without_the_model_that_it_began_with(run: Path, folder: Path) -> None:
    job = write_job(folder, "moved")
    main(["train", str(job), "train.length=2 epochs", "scaling.workers=2"])
    moved = folder / "gone"
    shutil.move(folder / "gpt2", moved)
    try:
        main(["train", str(job), "train.length=3 epochs", "scaling.workers=1"])
    finally:
        shutil.move(moved, folder / "gpt2")
    np.testing.assert_allclose(losses(folder / "runs" / "moved"), losses(run), rtol=FLOAT64)


def test_a_run_whose_length_was_in_steps_goes_on_in_epochs(folder: Path) -> None:
    job = write_job(folder, "counted")
    in_steps = [
        "train.length=2 steps",
        "drop.schedule={kind: constant, kept: 8}",
        "checkpoint.every=2 steps",
        "evaluate.every=100%",
    ]
    main(["train", str(job), *in_steps])
    main(["train", str(job), *in_steps, "train.length=0.2 epochs"])
    config, _ = open_run_folder(folder / "runs" / "counted")
    assert config.steps == len(losses(folder / "runs" / "counted")) == ceil(config.data.epoch_samples / 40)


def test_an_evaluation_gives_perplexities_of_both_splits_per_token_and_per_word(
    run: Path, folder: Path, capsys
) -> None:
    """Words of two lines run together in rows, and are counted as two."""
    main(["evaluate", str(run), "--json"])
    result = json.loads(capsys.readouterr().out)
    _, data = open_run_folder(run)
    for split, key in (("validation", "val_loss"), ("test", "test_loss")):
        found = result[split]
        assert found["rows"] == min(64, read_manifest(data).committed(split).rows[0])
        assert found["perplexity"] == pytest.approx(np.exp(found[key]))
        left, words, tokens = 33 * found["rows"], 0, 33 * found["rows"]
        for line in (folder / f"{split.removesuffix('ation')}.txt").read_text().splitlines():
            words += len(line[:left].split())  # a byte is a token
            left = max(0, left - len(line))
        assert found["word_perplexity"] == pytest.approx(np.exp(found[key] * tokens / words))
    assert result["validation"]["val_loss"] != result["test"]["test_loss"]


def test_jobs_in_epochs_are_compared(folder: Path, capsys) -> None:
    jobs = [str(write_job(folder, name)) for name in ("first", "second")]
    changes = ["train.length=0.2 epochs", "drop.schedule={kind: constant, kept: 8}", "run=null", "evaluate.every=100%"]
    main(["compare", *jobs, *(part for one in changes for part in ("--set", one)), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["not_timed"] is None
    assert len(result["step_time_over_first"]) == len(result["runs"]) == 2
