"""What `tokendrop plan` prints of workers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tokendrop.cli.main import main
from tokendrop.cli.plan import _taken
from tokendrop.config.load import load_job
from tokendrop.schedule.scaling import Estimate, estimate

JOB = Path(__file__).parents[2] / "jobs" / "paper" / "gpt3_1.3b_ltd.yaml"
ELASTIC = ["scaling.profile=a100-40g-8", "scaling.mode=schedule", "scaling.deadline_hours=116"]


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    main(["plan", str(JOB), *overrides, "--json"])
    return json.loads(capsys.readouterr().out)


def test_an_elastic_plan_is_billed_beside_the_fixed_size(capsys) -> None:
    result, config = printed(capsys, *ELASTIC), load_job(JOB, ELASTIC)
    assert config.scaling.profile is not None
    now, then = (estimate(plan, config.scaling.profile) for plan in (config.plan, config.fixed_plan))
    assert (result["gpu_hours"], result["gpu_hours_fixed"]) == (now.gpu_hours, then.gpu_hours)
    assert (result["cost"], result["cost_fixed"]) == (now.cost, then.cost)
    assert (result["wall_clock_s"], result["wall_clock_s_fixed"]) == (now.wall_clock_s, then.wall_clock_s)
    assert result["wall_clock_s"] <= 116 * 3600
    assert result["gpu_hours"] < result["gpu_hours_fixed"]


def test_resizes_are_where_the_segments_change_workers(capsys) -> None:
    result = printed(capsys, *ELASTIC)
    segments, micro_batches = result["segments"], result["global_batch"] // result["micro_batch"]
    edges = [
        {"step": two["start"], "from": one["workers"], "to": two["workers"]}
        for one, two in pairwise(segments)
        if one["workers"] != two["workers"]
    ]
    assert result["resizes"] == edges != []
    assert all(segment["workers"] * segment["accumulation"] == micro_batches for segment in segments)


def test_a_fixed_size_costs_what_itself_does_and_without_a_profile_nothing_is_said(capsys) -> None:
    result = printed(capsys, "scaling.profile=a100-40g-8")
    assert result["resizes"] == []
    assert result["cost"] == result["cost_fixed"]
    assert "cost" not in printed(capsys)


def test_people_read_both_bills(capsys) -> None:
    main(["plan", str(JOB), *ELASTIC])
    out = capsys.readouterr().out
    assert "expected       115.6 h, 6,052.94 GPU-hours, $7,868.83   by a100-40g-8 (derived)" in out
    assert "fixed size     96.7 h, 6,190.12 GPU-hours, $8,047.16   on 64 workers" in out
    assert "workers        32, 64 from step 108,481" in out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0021, "0.0021 s"), (2400, "2,400.00 s"), (3600, "1.0 h"), (5e6, "1,388.9 h")],
)
def test_short_and_long_runs_are_told_in_a_unit_that_fits(seconds: float, said: str) -> None:
    found = Estimate(wall_clock_s=seconds, gpu_hours=seconds / 3600, cost=seconds / 1800)
    assert _taken(found).startswith(f"{said}, ")
    assert " 0.00 " not in _taken(found)
    assert "$0.00," not in _taken(found) + ","


@pytest.mark.parametrize(("name", "decay"), [("quickstart", "0.1"), ("bert_tiny", "0.1"), ("vit_tiny", "0.05")])
def test_whose_parameters_are_whose_is_told(name: str, decay: str, capsys) -> None:
    main(["plan", str(JOB.parents[1] / "pretrain" / f"{name}.yaml"), "train.optimizer=muon"])
    assert (
        "optimizer      muon, momentum 0.9, of the layers' matrices; adamw (0.9, 0.95) of the rest;"
        f" weight decay {decay} of matrices, none of biases and norms\n"
    ) in capsys.readouterr().out


def test_where_layers_keep_different_lengths_each_is_told_beside_their_mean(capsys) -> None:
    layers = "drop.by_layer={1-11: {kind: constant, kept: 1024}}"
    plain, mixed = printed(capsys), printed(capsys, layers)
    assert all("kept_lengths" not in segment for segment in plain["segments"])
    first, last = mixed["segments"][0], mixed["segments"][-1]
    assert first["kept_lengths"] == {f"{layer}": 1024 if layer < 12 else 128 for layer in range(1, 23)}
    assert first["kept_length"] == (1024 + 128) / 2
    assert last["kept_length"] == (1024 + 2048) / 2
    main(["plan", str(JOB), layers])
    assert "576 on average" in capsys.readouterr().out


def test_where_layers_are_computed_again_is_told_with_what_is_kept(capsys) -> None:
    limit = ("train.activation_checkpointing=10 GB",)
    plain, limited = printed(capsys, "train.activation_checkpointing=false"), printed(capsys, *limit)
    assert not any(segment["recomputes"] or "activation_bytes" in segment for segment in plain["segments"])
    assert {segment["recomputes"] for segment in limited["segments"]} == {False, True}
    assert all(segment["activation_bytes"] <= 10 * 10**9 for segment in limited["segments"])
    assert limited["flops"] == plain["flops"]
    main(["plan", str(JOB), *limit])
    out = capsys.readouterr().out
    last = limited["segments"][-1]
    assert f"{last['activation_bytes'] / 1e9:.3g} GB, recomputed" in out
    steps = sum(one["stop"] - one["start"] for one in limited["segments"] if one["recomputes"])
    share = f"{steps / limited['steps']:.1%}"
    assert f"recomputed     all layers, in the backward pass in {share} of the steps; neither FLOPs nor hours" in out
