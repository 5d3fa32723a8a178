"""A profile out of `tokendrop bench device` gives its step times back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.bench.device import SIZES, Wanted, job_of
from tokendrop.bench.device_model import PLAIN, SHARES, UPDATE, FirstSteps, Measured
from tokendrop.bench.device_profile import profile_from
from tokendrop.bench.device_result import model_result
from tokendrop.cli.main import main
from tokendrop.config.files import profile_mapping
from tokendrop.config.load import build, load_job
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.scaling import step_s

WANTED = Wanted(minutes=9, precision="fp32", rounds=3)
JOB = Path(__file__).parents[2] / "jobs" / "paper" / "gpt3_350m_ltd.yaml"
Times = dict[str, list[float]]


def times(update_s: float, *steps_s: float) -> Times:
    """Seconds of each case, in one round."""
    seconds = dict(zip(SHARES, ([one] for one in steps_s), strict=True))
    return seconds | {UPDATE: [update_s], PLAIN: [steps_s[-1]]}


def result(times_of: dict[str, Times]) -> dict[str, Any]:
    """What a device that takes these times would have written."""
    first = FirstSteps(
        alone_s=[1.0],
        first_s=dict.fromkeys([*SHARES, PLAIN], 1.0),
        peak_bytes=dict.fromkeys([*SHARES, PLAIN]),
        host_waits=None,
        save=None,
    )
    models = [
        model_result(
            job_of(preset, WANTED, compiled=False),
            Measured(first=first, seconds=seconds, rounds=1, build_s=1, setup_s=1, round_s=1),
            None,
        )
        for preset, seconds in times_of.items()
    ]
    machine = {"device": "a device", "torch": "2.11"}
    told = {"bench": "device", "precision": "bf16", "compiled": True, "command": "tokendrop bench device"}
    return told | {"models": models, "machine": machine}


def written(folder: Path, content: object) -> Path:
    file = folder / "device.json"
    file.write_text(json.dumps(content))
    return file


seconds_of_steps = st.lists(st.floats(1e-3, 10), min_size=len(SHARES), max_size=len(SHARES))


@given(st.dictionaries(st.sampled_from(sorted(SIZES)), st.tuples(st.floats(1e-5, 1), seconds_of_steps), min_size=1))
def test_a_step_on_one_worker_takes_what_was_measured(
    tmp_path_factory: pytest.TempPathFactory, measured: dict[str, tuple[float, list[float]]]
) -> None:
    times_of = {preset: times(update_s, *sorted(steps_s)) for preset, (update_s, steps_s) in measured.items()}
    file = written(tmp_path_factory.mktemp("measured"), result(times_of))
    profile = profile_from(file, like="h200-8", name="here")
    shipped: DeviceProfile = build(DeviceProfile, profile_mapping("h200-8", ""), "")
    assert profile.between_nodes == shipped.between_nodes
    for preset, seconds in times_of.items():
        config = job_of(preset, WANTED, compiled=False)
        shape, micro = config.model.shape, config.train.micro_batch
        batch = BatchSplit(global_batch=micro, micro_batch=micro, world_size=1)
        for share, (above, below) in SHARES.items():
            flops = shape.flops(kept=shape.sequence_length * above // below, dropped_layers=shape.layers - 2)
            took = profile.step_s(shape, flops=flops, batch=batch)
            assert took == pytest.approx(seconds[share][0]), (preset, share)


def test_a_job_is_planned_by_the_profile_that_the_command_writes(tmp_path: Path, capsys) -> None:
    measured = {"gpt3-350m": times(0.01, 0.1, 0.11, 0.13, 0.18, 0.21, 0.25)}
    file, out = written(tmp_path, result(measured)), tmp_path / "here.yaml"
    main(["profile", "--from", str(file), "--like", "a100-40g-8", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "gpt3-350m" in printed
    assert str(out) in printed
    size = ["train.global_batch=8", "train.micro_batch=8", "scaling.workers=1", f"scaling.profile={out}"]
    config = load_job(JOB, size)
    profile, plan = config.scaling.profile, config.plan
    assert profile is not None
    assert (profile.name, profile.kind) == ("here", "measured")
    assert "they are those of a100-40g-8: " in profile.source
    took = {segment.kept_length: step_s(plan, profile, segment, 1) for segment in plan.segments}
    assert [took[kept] for kept in (128, 256, 512, 1024, 1536, 2048)] == pytest.approx(
        [seconds for share in SHARES for seconds in measured["gpt3-350m"][share]]
    )
    assert took[1024] < took[1040] < took[1536]


@pytest.mark.parametrize(
    "content", [[], {}, {"bench": "step"}, {"bench": "device"}, {"bench": "device", "models": [1]}]
)
def test_a_file_of_something_else_is_named(complaint, tmp_path: Path, content: object) -> None:
    file = written(tmp_path, content)
    said = complaint("profile", "--from", file, "--out", tmp_path / "out.yaml")
    assert said.startswith(f"{file}: want a result of tokendrop bench device")


def test_what_can_not_be_a_profile_is_said_before_anything_is_written(complaint, tmp_path: Path) -> None:
    file, out = written(tmp_path, result({"gpt-1m": times(0.01, 1, 1, 1, 1, 1, 1)})), tmp_path / "out.yaml"
    assert complaint("profile", "--from", file, "--like", "h100", "--out", out).startswith("--like: want a100-40g-8,")
    assert complaint("profile", "--out", out) == "profile: want a job file, or --from FILE and no job"
    assert complaint("profile", JOB, "--from", file, "--out", out) == (
        "profile: want a job file, or --from FILE and no job"
    )
    empty = written(tmp_path, {"bench": "device", "models": []})
    assert complaint("profile", "--from", empty, "--out", out).endswith("that holds at least one model")
    damaged = result({"gpt-1m": times(0.01, 1, 1, 1, 1, 1, 1)})
    damaged["models"][0]["update_ms"]["median"] = -3.0
    said = complaint("profile", "--from", written(tmp_path, damaged), "--out", out)
    assert said.endswith("want a result of tokendrop bench device, as --out of that writes it")
    assert not out.exists()


@pytest.mark.parametrize(
    "changes", [{"fp8": "rowwise"}, {"compile": "static"}, {"compile": "static", "cuda_graphs": True}]
)
def test_what_was_measured_in_another_way_than_jobs_run_by_default_is_no_part_of_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    usual = result({"gpt-1m": times(0.1, *[1.0] * len(SHARES))})
    other = result({"gpt-1m": times(0.1, *[0.5] * len(SHARES))})["models"][0] | changes
    both = usual | {"models": [*usual["models"], other]}
    expected = profile_from(written(tmp_path, usual), like="h200-8", name="here")
    assert profile_from(written(tmp_path, both), like="h200-8", name="here") == expected
