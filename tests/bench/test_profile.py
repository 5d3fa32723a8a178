"""A profile measured here is one that a job takes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from corpora import documents, tiny_job, write_corpus
from strategies import MEASURED
from task_jobs import CASES
from tiny import experiment
from tokendrop.bench.exchange import measure_link
from tokendrop.bench.node_link import measure_node_link
from tokendrop.bench.profile import _speeds, _timed_method, timed_job
from tokendrop.cli.main import main
from tokendrop.config.drop import RandomLtd
from tokendrop.config.load import build, load_job
from tokendrop.config.run import ScalingConfig
from tokendrop.errors import UserError
from tokendrop.schedule.device import DeviceProfile, Link
from tokendrop.schedule.scaling import step_s
from tokendrop.train.worker import build_engine


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tiny_job(tmp_path, [write_corpus(tmp_path / "good.jsonl", documents(8))])


@pytest.mark.long
def test_what_profile_writes_plans_the_job_that_it_was_measured_on(job, tmp_path, capsys) -> None:
    out = tmp_path / "here.yaml"
    # which is how many share a node's memory here
    two = "scaling={mode: schedule, profile: h200-8, max_workers: 2, cpus_per_worker: 1}"
    main(["profile", str(job), two, "--out", str(out), "--rounds", "1", "--json"])
    result = json.loads(capsys.readouterr().out)

    config = load_job(job, [f"scaling={{mode: schedule, profile: {out}, max_workers: 2}}"])

    profile = config.scaling.profile
    assert profile is not None
    assert result["file"] == str(out)
    assert (profile.name, profile.kind) == ("here", "measured")
    assert result["profile"]["speeds"][0]["points"] == [asdict(point) for point in profile.speeds[0].points]
    assert profile.speeds[0].shape == config.model.shape
    assert {point.micro_batch for point in profile.speeds[0].points} == {1, config.train.micro_batch}
    assert not list((tmp_path / "runs").glob(".profile-*"))
    assert profile.restore_bytes_per_s is not None
    assert min(profile.checkpoint_bytes_per_s, profile.restore_bytes_per_s) > 1e5
    assert 1 <= profile.full_node_slowdown < 20
    assert 0.2 < profile.resize_s < 200  # to import torch alone takes that long
    assert profile.pause_s(config.model.shape, before=1, after=2) > profile.resize_s


@pytest.mark.parametrize("case", ["causal", "random-LTD, NSP", "classification", "images"])
def test_a_step_on_one_worker_is_planned_to_take_what_was_measured(case: str) -> None:
    """Also where the head runs on some of the tokens alone."""
    config = timed_job(CASES[case])
    engine, dropping = build_engine(config, torch.device("cpu"))
    speed, _ = _speeds(config, engine, dropping, rounds=1, log=lambda _: None)
    profile = replace(MEASURED, speeds=(speed,), update_s_per_parameter=0.0)
    plan = replace(config, drop=CASES["choices"].drop).plan
    (full,) = plan.segments
    (seconds,) = (one.seconds for one in speed.points if one.kept_length == config.model.sequence_length)
    assert step_s(plan, profile, full, 1) == pytest.approx(plan.batch.accumulation * seconds)


@pytest.mark.parametrize("group", ["tensor_parallel", "context_parallel"])
def test_a_job_of_groups_is_timed_on_one_worker(group: str) -> None:
    bounded = {"train__activation_checkpointing": "0.18 MB"}  # enough for a group, and too little for one worker
    config = experiment(scaling__workers=4, **bounded, **{f"train__{group}": 2})
    timed = timed_job(config)
    assert timed.plan.batch == replace(config.plan.batch, world_size=1, group=1)
    assert timed.train.activation_checkpointing is True
    single = experiment(train__activation_checkpointing="0.25 MB")
    assert timed_job(single).train.activation_checkpointing == "0.25 MB"


@pytest.mark.parametrize("drop", [{"method": "layer_dropout", "keep": 0.5}, {"method": "token_bypass", "first": 0}])
def test_methods_without_a_kept_length_of_their_own_are_timed_as_random_ltd(drop) -> None:
    assert isinstance(_timed_method(experiment(drop=drop, train__warmup="0 steps")), RandomLtd)
    tread = experiment(drop={"method": "tread"}, train__warmup="0 steps")
    assert _timed_method(tread) is tread.drop


@pytest.mark.long
def test_more_values_take_longer_to_sum() -> None:
    link, backend = measure_link(values=2**20)
    assert backend in ("gloo", "nccl")
    assert 1e6 < link.bytes_per_s < 1e12
    assert link.gather_bytes_per_s is not None
    assert 1e6 < link.gather_bytes_per_s < 1e12
    assert 0 < link.latency_s < 1


@pytest.mark.parametrize("out", ["here.txt", "taken.yaml", "nowhere/here.yaml"])
def test_a_place_where_no_profile_can_be_written_is_refused_at_once(job, tmp_path, capsys, out) -> None:
    (tmp_path / "taken.yaml").write_text("mine")
    with pytest.raises(SystemExit) as end:
        main(["profile", str(job), "--out", str(tmp_path / out)])
    assert end.value.code == 2
    assert "want a new .yaml file in a folder that exists" in capsys.readouterr().err
    assert (tmp_path / "taken.yaml").read_text() == "mine"


def test_nodes_of_no_cluster_are_refused_at_once(job, tmp_path, monkeypatch, complaint) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = complaint("profile", job, "--nodes", "--out", tmp_path / "here.yaml")
    assert said.startswith("--nodes: want RAY_ADDRESS, ")
    assert not (tmp_path / "here.yaml").exists()
    said = complaint("profile", "--from", tmp_path / "device.json", "--nodes")
    assert said == "profile: --resizes and --nodes go with a job, not with --from"


def test_the_link_between_nodes_is_the_measured_one_and_all_else_as_before(job, tmp_path, monkeypatch) -> None:
    link = Link(bytes_per_s=1e8, gather_bytes_per_s=2e8, latency_s=1e-3)
    monkeypatch.setattr("tokendrop.bench.node_link.measure_node_link", lambda scaling, log: (link, "gloo"))
    monkeypatch.setattr("tokendrop.bench.profile.measure_profile", lambda config, **_: MEASURED)
    main(["profile", str(job), "--nodes", "--out", str(tmp_path / "here.yaml")])
    profile = build(DeviceProfile, str(tmp_path / "here.yaml"), "profile")
    assert profile.between_nodes == link != MEASURED.between_nodes
    assert profile.source.startswith(MEASURED.source)
    assert profile.source.endswith("Links between nodes: one device on each of two nodes of a Ray cluster, by gloo.")
    assert replace(profile, between_nodes=MEASURED.between_nodes, source=MEASURED.source) == MEASURED


def test_step_times_and_links_are_of_the_same_kind_of_device(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    other = ScalingConfig(gpus_per_worker=0 if torch.cuda.is_available() else 1)
    with pytest.raises(UserError, match=r"^--nodes: want scaling\.gpus_per_worker of 1 on a machine with a GPU"):
        measure_node_link(other, log=print)


def test_a_job_with_cuda_graphs_is_timed_with_them() -> None:
    """These want a GPU for each worker, which the one that is timed has too."""
    graphs = {"train__compile": "static", "train__cuda_graphs": True, "drop__buckets": 2}
    timed = timed_job(experiment(scaling__gpus_per_worker=1, **graphs))
    assert timed.train.cuda_graphs
    assert timed.scaling.gpus_per_worker == 1
