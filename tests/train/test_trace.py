"""A trace of some steps changes nothing of a run, and its phases add up."""

import gzip
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from groups import together, train_until
from mutations import flip_bit
from recorded import record
from tiny import experiment
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.traced_steps import TracedSteps
from tokendrop.launch import resume
from tokendrop.study import identity
from tokendrop.track.journal import read_steps
from tokendrop.train.trace import tracing
from tokendrop.train.trace_summary import PROFILE, read_summary, write_summary

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def traced(steps: str, **changes: object) -> ExperimentConfig:
    return experiment(train__profile={"steps": steps}, **changes)


CASES = {
    "dropped": (1, traced("2..3")),
    "full length": (1, traced("2..3", drop={"method": "none"})),
    "two workers": (2, traced("2..3")),
    "shared out": (2, traced("2..3", train__strategy="fsdp")),
    "cut short": (1, traced("3..6")),
    "none": (1, experiment()),
}


def train_all(folder: Path, workers: int) -> None:
    for name, (wanted, config) in CASES.items():
        if wanted == workers:
            train_until(config, folder / name, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps of each case."""
    folder = tmp_path_factory.mktemp("traced")
    for workers in (1, 2):
        together(workers, train_all, folder, workers)
    return folder


@pytest.mark.parametrize("case", ["dropped", "full length", "two workers", "shared out", "cut short"])
def test_phases_add_up_to_the_step_and_hold_what_is_within(runs: Path, case: str) -> None:
    workers, config = CASES[case]
    summary = read_summary(runs / case)
    assert summary is not None
    first, last = (3, 4) if case == "cut short" else (2, 3)
    assert (summary["first_step"], summary["last_step"], summary["world_size"]) == (first, last, workers)
    phases, within = summary["phases_s"], summary["within_s"]
    assert set(phases) == {"data", "forward", "backward", "optimizer", "other"}
    assert sum(phases.values()) == pytest.approx(summary["step_s"])
    assert min(phases["forward"], phases["backward"], phases["optimizer"]) > 0
    assert (within["gather and combine"] > 0) == (config.drop.method != "none")
    assert (within["communication"] > 0) == (workers > 1)
    assert within["gather and combine"] < summary["step_s"]
    with gzip.open(runs / case / PROFILE / f"steps_{first}_to_{last}.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    micro_batches = config.plan.batch.global_batch // (workers * config.train.micro_batch)
    assert names.count("forward") == 2 * micro_batches


def test_a_traced_run_trains_what_it_would_have_without(runs: Path) -> None:
    one, other = ([(row["loss"], row["grad_norm"]) for row in read_steps(runs / case)] for case in ("dropped", "none"))
    assert one == other
    assert read_summary(runs / "none") is None
    assert not (runs / "none" / PROFILE).exists()


def test_steps_go_on_while_a_trace_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone_on, engine = threading.Event(), SimpleNamespace(device=torch.device("cpu"), world_size=1, label=None)
    waited: list[bool] = []
    export = profile.export_chrome_trace
    monkeypatch.setattr(profile, "export_chrome_trace", lambda *args: (waited.append(gone_on.wait(10)), export(*args)))
    with tracing(TracedSteps(steps="1..1"), tmp_path, engine) as trace:  # pyright: ignore[reportArgumentType]
        with trace(1):
            torch.ones(2).sum()
        with trace(2):
            gone_on.set()
    assert waited == [True]
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["last_step"] == 1


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    engine = SimpleNamespace(device=torch.device("cpu"), world_size=1, label=None)
    (tmp_path / PROFILE).touch()
    with (
        pytest.raises(FileExistsError),
        tracing(TracedSteps(steps="1..1"), tmp_path, engine) as trace,  # pyright: ignore[reportArgumentType]
        trace(1),
    ):
        torch.ones(2).sum()


@pytest.mark.parametrize("text", ["", "20", "20-25", "0..3", "5..4", "1..101", "a..b", "1..2..3"])
def test_steps_that_are_no_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^steps: want "):
        TracedSteps(steps=text)


def test_steps_beyond_the_end_of_the_run_are_refused() -> None:
    last = experiment().steps
    traced(f"{last}..{last}")
    with pytest.raises(ValueError, match=rf"^train\.profile\.steps: the run ends with step {last}, got"):
        traced(f"{last}..{last + 1}")


def test_a_run_is_the_same_one_whether_or_not_it_is_traced() -> None:
    plain, with_trace = CASES["none"][1], CASES["dropped"][1]
    assert identity.settings_of(with_trace) == identity.settings_of(plain)
    assert resume.settings(with_trace) == resume.settings(plain)


def test_a_report_tells_where_the_time_of_traced_steps_went(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run, name="drops")
    page = tmp_path / "page.html"
    main(["report", str(run), "--to", str(page)])
    assert "traced steps" not in page.read_text()
    (run / PROFILE).mkdir()
    summary = {"first_step": 2, "last_step": 3, "world_size": 1, "step_s": 0.5}
    summary |= {"phases_s": {"forward": 0.2, "other": 0.3}, "within_s": {"communication": 0.1}}
    write_summary(run, summary)
    main(["report", str(run), "--to", str(page)])
    told = page.read_text()
    assert "Where the time of traced steps went" in told
    assert all(f"<td>{share}</td>" in told for share in ("2 to 3", "40.0%", "60.0%", "20.0%"))
    flip_bit(run / PROFILE / "summary.json", 0.5)
    main(["report", str(run), "--to", str(page)])
    assert "traced steps" not in page.read_text()
