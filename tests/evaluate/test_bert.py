"""A BERT from its corpus to Hugging Face: trained and streamed on Ray, evaluated, exported."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForPreTraining

from corpora import tiny_job, write_corpus
from pairs import LENGTH, texts
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.evaluate.export import export_checkpoint
from tokendrop.evaluate.load import load_run
from tokendrop.track.audit import audit
from tokendrop.track.run_folder import open_run_folder, summarize
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

FLOAT64, TOLERANCE = 1e-10, 1e-5
DROPS = {"method": "random_ltd", "full_length_layers": "first", "schedule": {"kind": "constant", "kept": 16}}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    corpus = write_corpus(folder / "corpus.jsonl", texts(120, seed=3))
    model = {"kind": "bert", "sequence_length": LENGTH, "vocab_size": 512}
    data = {"rows_per_shard": 64, "pairs": {"sentence_task": "nsp"}, "tokenizer_vocab_size": 400}
    train = {"length": "4 steps", "precision": "fp64"}
    return tiny_job(folder, [corpus], model=model, data=data, train=train, drop=DROPS, task={"kind": "masked_lm"})


@pytest.fixture(scope="module")
def run(job: Path) -> Path:
    main(["train", str(job), "run=whole", "track.uri=null", "checkpoint.every=2 steps"])
    return job.parent / "runs" / "whole"


def test_an_evaluation_gives_the_figures_of_training(run: Path, capsys) -> None:
    trained = summarize(run)
    main(["evaluate", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)["validation"]
    names = ["val_loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy"]
    assert [found[name] for name in names] == pytest.approx(
        [trained[f"val_{name.removeprefix('val_')}"] for name in names], rel=FLOAT64
    )
    assert math.isfinite(found["val_loss"])


def test_an_exported_model_has_our_logits_and_its_tokenizer_our_pairs(run: Path, tmp_path: Path) -> None:
    model, tokenizer, _ = load_run(run)
    folder, _ = export_checkpoint(run, tmp_path / "hf")
    theirs, words = BertForPreTraining.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    read = words("the first text", "and the second", return_tensors="pt")
    tokens = [tokenizer.id_to_token(number) for number in read["input_ids"][0].tolist()]
    assert (tokens[0], tokens.count("[SEP]"), tokens[-1]) == ("[CLS]", 2, "[SEP]")
    with torch.no_grad():
        expected = theirs(**read)
        hidden = model.hidden(read["input_ids"], read["token_type_ids"], read["attention_mask"].bool())
        ours = model.token_logits(hidden), model.sentence_logits(hidden)
    assert read["token_type_ids"].sum() > 0
    for one, other in zip(ours, (expected.prediction_logits, expected.seq_relationship_logits), strict=True):
        torch.testing.assert_close(other, one, atol=TOLERANCE, rtol=TOLERANCE)


def test_streamed_by_ray_data_it_learns_the_same(job: Path, run: Path) -> None:
    """Wrong sentences come with the rows, and the tokenizer from the run's folder."""
    main(["train", str(job), "run=streamed", "track.uri=null", "data.reader=ray_data"])
    other = job.parent / "runs" / "streamed"
    weights = [torch_weights(folder) for folder in (run, other)]
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=0, atol=FLOAT64)


def torch_weights(run: Path) -> dict[str, np.ndarray]:
    assert committed(run / CHECKPOINTS)[-1].name.endswith("4")
    model, _, _ = load_run(run, torch.float64)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def test_tasks_of_lm_eval_are_refused_in_a_sentence(run: Path, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["evaluate", str(run), "--tasks", "piqa"])
    assert refused.value.code == 2
    assert "a BERT predicts masked ones" in capsys.readouterr().err


def test_a_run_says_its_task(run: Path) -> None:
    assert open_run_folder(run)[0].task.kind == "masked_lm"


def test_its_ledger_has_each_sample_once(run: Path) -> None:
    assert audit(run).is_clean


def test_a_run_is_finetuned_on_examples_judged_and_exported(run: Path, job: Path, capsys) -> None:
    folder = job.parent / "finetuned"
    folder.mkdir()
    lines = [{"sentence": one, "label": len(one) % 2} for one in texts(40, seed=5)]
    corpus, held_out = folder / "examples.jsonl", folder / "held_out.jsonl"
    for file in (corpus, held_out):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained_on = load_job(job).model
    model = {"kind": "bert", "sequence_length": 16, "vocab_size": 512}
    model |= {key: getattr(trained_on, key) for key in ("layers", "width", "heads")} | {"init_from": str(run)}
    task = {"kind": "text_classification", "preset": "sst2", "metrics": ["accuracy", "f1", "matthews_correlation"]}
    branches = {"data": {"validation_corpus": [str(held_out)]}, "train": {"length": "2 epochs", "precision": "fp64"}}
    drops = {"method": "random_ltd", "full_length_layers": "first", "schedule": {"kind": "constant", "kept": 8}}
    tiny_job(folder, [corpus], model=model, task=task, drop=drops, evaluate={"sequences": 40}, **branches)
    main(["train", str(folder / "job.yaml"), "run=glue"])
    assert "accuracy" in capsys.readouterr().out
    main(["evaluate", str(folder / "runs" / "glue"), "--json"])
    found = json.loads(capsys.readouterr().out)["validation"]
    assert found.keys() == {"val_loss", "accuracy", "f1", "matthews_correlation", "rows"}
    assert (found["rows"], summarize(folder / "runs" / "glue")["steps"]) == (40, 20)
    main(["export", str(folder / "runs" / "glue"), "--to", str(folder / "hf")])
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "hf").eval()
    words = AutoTokenizer.from_pretrained(folder / "hf")
    read = words(
        [line["sentence"] for line in lines], truncation=True, max_length=16, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hits = theirs(**read).logits.argmax(1) == torch.tensor([line["label"] for line in lines])
    assert hits.double().mean().item() == pytest.approx(found["accuracy"])
