"""`tokendrop compare`: a table of runs, the savings of each against the first, and where they are."""

import json
import re
from pathlib import Path

import pytest

from corpora import documents, tiny_job, write_corpus
from tokendrop.cli.main import main

DROPS = {"method": "random_ltd", "full_length_layers": "first", "schedule": {"kind": "constant", "kept": 16}}


@pytest.fixture
def jobs(tmp_path: Path) -> list[str]:
    """A job at full length, and the same one with fewer tokens."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(80))
    whole = tiny_job(tmp_path, [corpus]).rename(tmp_path / "whole.yaml")
    return [str(whole), str(tiny_job(tmp_path, [corpus], drop=DROPS))]


@pytest.mark.ray
def test_the_table_holds_what_each_run_came_to_and_the_time_of_steps_in_turns(jobs, tmp_path, ray_cluster, capsys):
    main(["compare", *jobs, "--set", f"track.uri=sqlite:///{tmp_path}/mlflow.db"])
    out = capsys.readouterr().out
    runs = sorted((tmp_path / "runs").glob("tiny-*"))
    header, _, first, second = (re.split("  +", line) for line in out.split("\n\n")[0].strip().splitlines())
    counted = ["run", "val loss", "perplexity", "layer tokens", "FLOPs"]
    assert header == [*counted, "step time, in turns", "training time"]
    # two steps of four samples of 32 tokens in two layers; with 16 tokens in the second of them
    assert first[3] == "512"
    assert second[3] == "384 (-25.0%)"
    assert len(first) == len(header) - 1  # to itself it is compared in no way
    assert re.fullmatch(r"[+-][\d.]+% \([+-]\d+% to [+-]\d+%\)", second[5])
    assert all(re.fullmatch(r"[\d.]+ s", row[-1]) for row in (first, second))
    assert "the paper measured 25.6% of the wall clock at 1.3B" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("run folder")] == [
        str(run) for run in runs
    ]
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in out


@pytest.mark.long
@pytest.mark.ray
def test_scripts_read_the_time_of_steps_in_turns(jobs, ray_cluster, capsys):
    main(["compare", *jobs, "--json"])
    result = json.loads(capsys.readouterr().out)
    first, second = result["step_time_over_first"]
    assert first == {"median": 1, "min": 1, "max": 1, "unit": "x time", "turns": second["turns"]}
    assert 0 < second["min"] <= second["median"] <= second["max"]
    assert result["not_timed"] is None
    assert [run["layer_tokens"] for run in result["runs"]] == [512, 384]


@pytest.mark.long
@pytest.mark.ray
def test_several_workers_are_not_timed_here_and_each_run_says_how_its_steps_spread(jobs, ray_cluster, capsys):
    main(["compare", *jobs, "--set", "scaling.workers=2"])
    out = capsys.readouterr().out
    header, _, *rows = (re.split("  +", line) for line in out.split("\n\n")[0].strip().splitlines())
    assert header[5] == "step time"
    for row in rows:
        median, low, high = map(float, re.fullmatch(r"(\S+) s \((\S+) to (\S+)\)", row[5]).groups())
        assert 0 < low <= median <= high
    assert "not measured in turns: there are several workers" in out
