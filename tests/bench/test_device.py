"""`tokendrop bench device`: its ratios are the plan's, and it runs with torch, numpy and PyYAML alone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import jumps
from tokendrop.bench import device
from tokendrop.bench.device import SIZES, Wanted, bench_device, job_of, jobs_of
from tokendrop.bench.device_model import SHARES, UPDATE, FirstSteps, Measured, measure_model
from tokendrop.bench.device_result import grown_s, model_result
from tokendrop.bench.peaks import peak_flops_per_s
from tokendrop.bench.schedule_saving import saving_over, schedule_figures
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(layers=6, width=32, sequence_length=64, vocab_size=100, mlp_width=128, causal=True)
WANTED = Wanted(presets=("gpt-1m", "gpt-5m"), minutes=0.01, precision="fp32", rounds=3)
EXACT = 1e-9
COMMAND = """
import sys
from importlib.abc import MetaPathFinder

class Forbid(MetaPathFinder):
    forbidden = {"ray", "mlflow", "pyarrow", "psutil", "tokenizers", "transformers", "rich", "torchao"}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.forbidden:
            raise ModuleNotFoundError(f"{fullname} is not installed here")

sys.meta_path.insert(0, Forbid())
from tokendrop.cli.main import main

main(["bench", "device", "--presets", "gpt-5m,gpt-1m", "--minutes", "0.01", "--rounds", "3", "--out", sys.argv[1]])
"""
MODEL = {
    *(
        "preset",
        "fp8",
        "compile",
        "cuda_graphs",
        "shape",
        "parameters",
        "dropped_layers",
        "micro_batch",
        "rounds",
        "lengths",
        "plain_gpt2",
    ),
    *("full_length_alone_ms", "update_ms", "schedule", "schedule_grown", "schedule_without_update"),
    *("start_s", "host_waits", "checkpoint"),
}
STEP = {"step_ms", "tokens_per_s", "flops_per_s", "mfu", "peak_memory_bytes"}
OURS = {"kept_length", "time_ratio", "flops_ratio", "gather_combine_share", "draw_share", "grown"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the command wrote, and what it printed."""
    out = tmp_path_factory.mktemp("device") / "device.json"
    command = [sys.executable, "-c", COMMAND, str(out)]
    environment = {"PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_each_length_is_timed_beside_its_flops_and_a_plain_gpt(measured) -> None:
    result, _ = measured
    (model,) = result["models"]
    assert model.keys() == MODEL
    assert result["figures"] == {
        "tokens_per_s_gpt-1m": model["lengths"]["1/1"]["tokens_per_s"],
        "realised_over_theory_gpt-1m": model["schedule"]["realised_over_theoretical"],
        "realised_over_theory_without_update_gpt-1m": model["schedule_without_update"]["realised_over_theoretical"],
        "plain_gpt2_over_ours_gpt-1m": model["plain_gpt2"]["over_ours"],
    }
    assert list(model["lengths"]) == list(SHARES)
    assert all(length.keys() == STEP | OURS for length in model["lengths"].values())
    assert model["plain_gpt2"].keys() == STEP | {"over_ours"}
    steps = [*model["lengths"].values(), model["plain_gpt2"]]
    assert all(step["step_ms"]["min"] > 0 and step["mfu"] is step["peak_memory_bytes"] is None for step in steps)
    for length in model["lengths"].values():
        tokens = SIZES["gpt-1m"].micro_batch * 256
        assert length["tokens_per_s"]["median"] == pytest.approx(tokens / length["step_ms"]["median"] * 1e3)
    assert 0 < model["lengths"]["1/16"]["gather_combine_share"]["median"] < 1
    full = model["lengths"]["1/1"]
    assert full["time_ratio"] == {"median": 1, "min": 1, "max": 1, "unit": "x full"}
    assert full["flops_ratio"] == 1
    assert full["gather_combine_share"]["max"] == full["draw_share"]["max"] == 0
    assert model["start_s"]["first_steps"].keys() == {*SHARES, "plain"}
    save = model["checkpoint"]
    assert 0 < save["blocked_s"] <= save["committed_s"]
    assert save["first_blocked_s"] + save["committed_s"] <= save["took_s"]
    assert save["bytes"] > 3 * 4 * model["parameters"]  # weights and two moments


@pytest.mark.long
def test_short_kept_lengths_are_timed_with_more_sequences_at_a_time_too() -> None:
    job = job_of("gpt-1m", WANTED, compiled=False)
    job = replace(job, model=replace(job.model, layers=12, width=32, heads=2, sequence_length=128, vocab_size=64))
    measured = measure_model(job, torch.device("cpu"), rounds=3, share_s=0.1, log=lambda _: None)
    result = model_result(job, measured, None)
    sizes = {share: entry["grown"] and entry["grown"]["micro_batch"] for share, entry in result["lengths"].items()}
    assert sizes == {"1/16": 8, "1/8": 4, "1/4": 4, "1/2": None, "3/4": None, "1/1": None}
    first = result["lengths"]["1/16"]
    assert first["grown"]["step_ms"]["median"] > 0 < first["grown"]["time_ratio"]["median"]
    assert grown_s(job, measured, "1/2") is None
    made_up = replace(measured, seconds={"grown 1/16": [10.0, 1.0], UPDATE: [2.0, 2.0]})
    assert grown_s(job, made_up, "1/16") == [4.0, 0.625]  # an update is half of its step at most


@pytest.mark.long
def test_each_model_is_timed_in_fp8_beside_without_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    sizes = replace(SIZES["gpt-1m"], micro_batch=1, sequence_length=128, vocab_size=64)
    monkeypatch.setitem(SIZES, "gpt-1m", sizes)
    wanted = replace(WANTED, presets=("gpt-1m",), minutes=60, precision="auto", fp8="rowwise", compiled=False)
    (plain, fp8) = bench_device(wanted, log=lambda _: None, save=lambda _: None)["models"]
    assert (plain["preset"], fp8["preset"]) == ("gpt-1m", "gpt-1m-fp8-rowwise")
    assert (plain["fp8"], fp8["fp8"]) == (None, "rowwise")
    assert plain["shape"] == fp8["shape"]
    assert plain["rounds"] == fp8["rounds"] == 3


def test_static_and_cuda_graphs_are_jobs_of_their_own_after_each_preset() -> None:
    wanted = replace(WANTED, static=True, cuda_graphs=True)
    jobs = jobs_of(["gpt-1m", "gpt-5m"], wanted, True, torch.device("cuda"))
    assert [job.name for job in jobs] == [
        f"{preset}{way}" for preset in ("gpt-1m", "gpt-5m") for way in ("", "-static", "-cuda-graphs")
    ]
    assert [(job.train.compile, job.train.cuda_graphs) for job in jobs[:3]] == [
        (True, False),
        ("static", False),
        ("static", True),
    ]
    with pytest.raises(UserError, match=r"^--cuda-graphs: want a GPU; this is a cpu"):
        jobs_of(["gpt-1m"], wanted, True, torch.device("cpu"))


def test_how_long_a_way_takes_is_expected_by_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static graphs take longer to compile: by their time, larger models of other ways would be left out."""
    first = FirstSteps(alone_s=[], first_s={}, peak_bytes={}, host_waits=None, save=None)

    def measured(config: ExperimentConfig, *_: object, **__: object) -> Measured:
        setup_s = 1e6 if config.train.compile == "static" else 1e-6
        return Measured(first=first, seconds={}, rounds=3, build_s=0, setup_s=setup_s, round_s=1e-6)

    monkeypatch.setattr(device, "measure_model", measured)
    monkeypatch.setattr(device, "model_result", lambda config, *_: {"preset": config.name})
    monkeypatch.setattr(device, "main_figures", lambda _: {})
    wanted = replace(WANTED, minutes=1, static=True, compiled=True)
    result = bench_device(wanted, log=lambda _: None, save=lambda _: None)
    assert [one["preset"] for one in result["models"]] == ["gpt-1m", "gpt-1m-static", "gpt-5m"]
    assert [one["preset"] for one in result["skipped"]] == ["gpt-5m-static"]


def test_without_fp8_on_a_device_nothing_is_measured() -> None:
    with pytest.raises(UserError, match=r"^train\.precision: with train\.fp8 .* want bf16 or auto, got 'fp32'"):
        jobs_of(["gpt-1m"], replace(WANTED, fp8="rowwise"), False, torch.device("cpu"))
    wanted = replace(WANTED, precision="auto", fp8="rowwise")
    with pytest.raises(UserError, match=r"^train\.fp8: this meta has no fp8"):
        jobs_of(["gpt-1m"], wanted, False, torch.device("meta"))
    assert [one.train.fp8 for one in jobs_of(["gpt-1m"], WANTED, False, torch.device("meta"))] == [None]


def test_its_ideal_is_that_of_the_plan(measured) -> None:
    result, _ = measured
    (model,) = result["models"]
    plan = job_of("gpt-1m", WANTED, compiled=False).plan
    steps = {segment.kept_length: segment for segment in plan.segments}
    for length in model["lengths"].values():
        planned = steps[length["kept_length"]].flops_per_step * plan.steps / plan.flops_full
        assert length["flops_ratio"] == pytest.approx(planned, rel=EXACT)
    assert model["schedule"]["theoretical_saving"] == pytest.approx(plan.flops_saving(), rel=EXACT)
    assert model["schedule"]["kept_lengths"] == [16, 256]


def test_what_does_not_fit_into_the_time_is_left_out_and_named(measured) -> None:
    result, printed = measured
    (skipped,) = result["skipped"]
    assert skipped["preset"] == "gpt-5m"
    assert skipped["reason"].endswith("s are left of --minutes")
    assert f"gpt-5m: skipped, {skipped['reason']}" in printed
    assert all(f"gpt-1m  {share:>11}" in printed for share in [*SHARES, "plain GPT-2"])


@pytest.mark.parametrize("size", ["350m", "1.3b"])
def test_the_schedule_is_the_papers(size: str) -> None:
    ours = job_of(f"gpt3-{size}", Wanted(minutes=1, precision="bf16", rounds=3), compiled=True)
    paper = load_job(ROOT / "jobs" / "paper" / f"gpt3_{size}_ltd.yaml")
    assert ours.model.shape == paper.model.shape
    assert [s.kept_length for s in ours.plan.segments] == [s.kept_length for s in paper.plan.segments]
    assert [s.kept_length for s in ours.plan.segments] == list(range(128, 2049, 16))
    assert ours.plan.flops_saving() == pytest.approx(paper.plan.flops_saving(), abs=1e-5)


def plan_of(schedule: KeptByStep) -> RunPlan:
    return build_plan(
        steps=200,
        routes=[RouteSchedule(span=(1, SHAPE.layers - 2), kept=schedule)],
        shape=SHAPE,
        batch=BatchSplit(global_batch=4, micro_batch=4, world_size=1),
        lr_clock="step",
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
    )


@given(jumps(SHAPE.sequence_length))
def test_by_its_flops_a_step_saves_what_the_plan_says(schedule: KeptByStep) -> None:
    plan = plan_of(schedule)
    saved = saving_over(plan, lambda kept: SHAPE.flops(kept=kept, dropped_layers=SHAPE.layers - 2))
    assert saved == pytest.approx(plan.flops_saving(), abs=EXACT)


@given(jumps(SHAPE.sequence_length // 2), st.floats(0, 10), st.floats(0.01, 1), st.floats(0.5, 2))
def test_times_that_grow_evenly_save_what_they_would_at_every_length(
    schedule: KeptByStep, fixed: float, each: float, plain: float
) -> None:
    plan, full = plan_of(schedule), fixed + each * SHAPE.sequence_length
    seconds = {kept: [fixed + each * kept, full] for kept in (1, 5, 17, 32, 64)}
    figures: Any = schedule_figures(plan, seconds, [full * plain, full])
    saved = saving_over(plan, lambda kept: fixed + each * kept)
    realised = figures["realised_saving"]
    assert (realised["max"], realised["min"]) == pytest.approx((saved, 0), abs=EXACT)  # of the second round, nothing
    assert figures["realised_over_theoretical"]["max"] == pytest.approx(saved / plan.flops_saving())
    against = sorted([1 - (1 - saved) / plain, 0.0])
    found = figures["realised_saving_against_plain"]
    assert [found["min"], found["max"]] == pytest.approx(against, abs=EXACT)


def test_what_does_not_fit_into_memory_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr("tokendrop.bench.device.measure_model", too_large)
    saved: list[list[str]] = []
    result = bench_device(
        WANTED, log=lambda _: None, save=lambda so_far: saved.append([one["preset"] for one in so_far["skipped"]])
    )
    assert saved == [["gpt-1m"], ["gpt-1m", "gpt-5m"]]
    assert result["models"] == []
    assert result["skipped"][0]["reason"].endswith("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD EPYC", None),
    ],
)
def test_a_peak_is_that_of_the_whole_card_in_bf16(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name, torch.bfloat16) == peak
    assert peak_flops_per_s(name, torch.float32) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--presets", "gpt-1m,gpt-2m"], "--presets: want some of gpt-1m,gpt-5m,gpt3-125m,gpt3-350m,gpt3-1.3b, got"),
        (["--presets", ""], "--presets: want some of gpt-1m,"),
        (["--minutes", "0"], "--minutes: want a number from 0.01 to 1440, got '0'"),
        (["--fp8", "e4m3"], "--fp8: invalid choice: 'e4m3' (choose from"),
        (["--rounds", "2"], "--rounds: want a whole number from 3 to 1,000, got '2'"),
        (["--micro-batch", "0"], "--micro-batch: want a whole number from 1 to 4,096, got '0'"),
        (["--out", "nowhere/device.json"], "--out nowhere/device.json: want a new .json file in a folder that exists"),
        (["--out", "device.txt"], "--out device.txt: want a new .json file in a folder that exists"),
    ],
)
def test_an_argument_that_is_wrong_is_named(complaint, tmp_path, monkeypatch, arguments, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint("bench", "device", *arguments).startswith(sentence)
    assert list(tmp_path.iterdir()) == []
