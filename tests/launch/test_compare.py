"""`tokendrop compare`: a table of runs, the savings of each against the first, and where they are."""

import re

import pytest

from corpora import documents, tiny_job, write_corpus
from tokendrop.cli import main

DROPS = {"method": "random_ltd", "whole_layers": "first", "schedule": {"kind": "constant", "kept": 16}}


@pytest.mark.ray
def test_the_table_holds_what_each_run_came_to(tmp_path, ray_cluster, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(80))
    whole = tiny_job(tmp_path, [corpus]).rename(tmp_path / "whole.yaml")
    drops = tiny_job(tmp_path, [corpus], drop=DROPS)
    main(["compare", str(whole), str(drops), "--set", f"track.uri=sqlite:///{tmp_path}/mlflow.db"])
    out = capsys.readouterr().out
    runs = sorted((tmp_path / "runs").glob("tiny-*"))
    header, _, first, second = out.split("\n\n")[0].strip().splitlines()
    assert re.split("  +", header) == [
        "run",
        "val loss",
        "perplexity",
        "layer tokens",
        "FLOPs",
        "training time",
        "tokens/s",
    ]
    # two steps of four samples of 32 tokens in two layers; with 16 tokens in the second of them
    assert re.split("  +", first)[3] == "512"
    assert re.split("  +", second)[3] == "384 (-25.0%)"
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("run folder")] == [
        str(run) for run in runs
    ]
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in out
