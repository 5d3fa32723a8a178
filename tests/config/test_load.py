"""Job files: read, inherited, overridden, written back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.config import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.layers import dropped_layers
from tokendrop.config.load import dump, dump_job, load_job
from tokendrop.config.model import BertConfig, GptConfig
from tokendrop.errors import UserError
from tokendrop.schedule.kept_length import Constant, Full, Linear, Mslg
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.scaling import Estimate, estimate

JOBS = Path(__file__).parents[2] / "jobs"
NO_JOBS = {*(JOBS / "sweeps").iterdir(), *(JOBS / "studies").iterdir()}
EVERY_JOB = sorted({*JOBS.rglob("*.yaml")} - NO_JOBS)
QUICKSTART = JOBS / "pretrain" / "quickstart.yaml"


def reload(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    (folder / "again.yaml").write_text(dump_job(config))
    return load_job(folder / "again.yaml")


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_there_are_jobs_to_test() -> None:
    assert QUICKSTART in EVERY_JOB


@pytest.mark.parametrize("job", EVERY_JOB, ids=lambda path: str(path.relative_to(JOBS)))
def test_every_job_loads_and_reads_back_equal_from_its_own_dump(job: Path, tmp_path: Path) -> None:
    config = load_job(job)
    again = reload(config, tmp_path)
    assert again == config
    assert hash(again) == hash(config)
    if config.waits_for_epochs:
        config, again = (load_job(path, ["data.epoch_samples=1000"]) for path in (job, tmp_path / "again.yaml"))
    assert again.plan == config.plan


def test_no_two_jobs_share_a_name() -> None:
    names = [load_job(job).name for job in EVERY_JOB]
    assert len(set(names)) == len(names)


def test_a_job_says_what_its_base_does_not(job: Path) -> None:
    over, base = load_job(job), load_job(job.parent / "base.yaml")
    assert (over.model, over.data) == (base.model, base.data)
    assert (over.name, base.name) == ("random-ltd", "baseline")
    assert over.train.lr_clock != base.train.lr_clock
    assert over.train.peak_lr == base.train.peak_lr
    assert isinstance(base.drop.schedule, Full)
    assert isinstance(over.drop.schedule, Linear)


def test_overrides_reach_any_depth_and_the_last_one_wins(job: Path) -> None:
    config = load_job(job, ["seed=7", "train.peak_lr=3e-3", "drop.schedule.start=32", "seed=8", "track.uri=null"])
    assert config.seed == 8
    assert config.train.peak_lr == 3e-3
    assert isinstance(config.drop.schedule, Linear)
    assert config.drop.schedule.start == 32
    assert config.track.uri is None


@pytest.mark.parametrize("name", ["h200-8", "file"])
def test_overrides_reach_into_a_profile_that_is_named(name: str, job: Path, tmp_path: Path) -> None:
    plain = load_job(job, ["scaling.profile=h200-8"]).scaling.profile
    assert plain is not None
    named = name if name == "h200-8" else write(tmp_path, "own.yaml", dump(plain))
    rate, pause = "scaling.profile.node_losses_per_hour=0.02", "scaling.profile.resize_s=30"
    found = load_job(job, [f"scaling.profile={named}", rate, pause]).scaling.profile
    assert found == replace(plain, node_losses_per_hour=0.02, resize_s=30.0)
    assert load_job(job, [rate, f"scaling.profile={named}"]).scaling.profile == plain  # the last one wins


def test_a_branch_may_be_overridden_whole(job: Path) -> None:
    config = load_job(job, ["drop.schedule={start: 96, until: 50%}"])
    assert isinstance(config.drop.schedule, Linear)
    assert (config.drop.schedule.start, config.drop.schedule.increment) == (96, 32)


def test_a_schedule_of_another_kind_replaces_the_one_below_it(job: Path, tmp_path: Path) -> None:
    by_override = load_job(job, ["drop.schedule={kind: constant, kept: 99}"])
    assert by_override.drop.schedule == Constant(kept=99)
    base = write(tmp_path, "linear.yaml", dump_job(load_job(job)))
    over = "drop: {schedule: {kind: mslg, start: 64, increment: 64, every: 5 steps}}"
    by_file = load_job(write(tmp_path, "over.yaml", f"base: {base}\n{over}"))
    assert isinstance(by_file.drop.schedule, Mslg)


def test_keys_beside_a_preset_win_over_it(job: Path) -> None:
    config = load_job(job, ["model.preset=gpt-5m", "model.layers=3"])
    assert (config.model.layers, config.model.width) == (3, 256)


def test_models_are_told_apart_by_their_kind(job: Path) -> None:
    assert isinstance(load_job(JOBS / "paper" / "bert_large_ltd1.yaml").model, BertConfig)
    assert isinstance(load_job(job).model, GptConfig)


@pytest.mark.parametrize("number", ["2e-3", "2.0e-3", ".002", "'0.002'"])
def test_a_learning_rate_may_be_spelled_in_any_way(number: str, job: Path) -> None:
    assert load_job(job, [f"train.peak_lr={number}"]).train.peak_lr == 0.002


@given(
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
    name=st.text("abcXYZ019-_.", min_size=1).filter(lambda name: name.strip(".")),
    corpus=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), min_size=1),
    length=st.decimals(1, 10**12, places=3),
    peak=st.floats(1e-12, 1e6),
)
def test_whatever_a_job_says_its_dump_says_too(job, tmp_path_factory, seed, name, corpus, length, peak) -> None:
    overrides = [f"seed={seed}", f"name='{name}'", f"train.length={length} steps", f"train.peak_lr={peak!r}"]
    config = load_job(job, [*overrides, "train.final_lr=0", f"data.corpus={yaml_list(corpus)}"])
    assert config.data.corpus == tuple(corpus)
    assert reload(config, tmp_path_factory.getbasetemp()) == config


@given(
    weights=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4),
    only=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"]))),
)
def test_several_sources_are_the_mixture_as_given(job, tmp_path_factory, weights, only) -> None:
    sources = [
        f"{{name: part_{number}, corpus: [a, b], weight: {weight!r}, only: {yaml_list(only)}}}"
        for number, weight in enumerate(weights)
    ]
    config = load_job(job, ["data.corpus=[]", f"data.sources=[{', '.join(sources)}]"])
    assert [source.weight for source in config.data.mixture] == weights
    assert {(source.corpus, source.only) for source in config.data.mixture} == {(("a", "b"), tuple(only))}
    assert [config.data.corpus_key(number) for number in (0, 3)] == [f"data.sources[{n}].corpus" for n in (0, 3)]
    assert reload(config, tmp_path_factory.getbasetemp()) == config


def test_a_corpus_is_a_mixture_of_one_source(job) -> None:
    data = load_job(job, ["data.corpus=[x, y]", "data.only=[Books]"]).data
    (source,) = data.mixture
    assert (source.corpus, source.only, data.corpus_key(0)) == (("x", "y"), ("Books",), "data.corpus")


def yaml_list(texts: list[str]) -> str:
    return "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"


def test_workers_by_segment_are_taken_as_they_are_written(job: Path) -> None:
    config = load_job(job, ["scaling={mode: schedule, segments: [{from: 0, workers: 2}, {from: 40%, workers: 1}]}"])
    plan = config.plan
    assert plan.resizes == ((64, 2, 1),)
    assert {plan.at(step).workers for step in range(64)} == {2}
    assert {plan.at(step).workers for step in range(64, 160)} == {1}
    assert config.scaling.most_workers == 2


def test_a_job_holds_its_profile_so_that_its_plan_needs_no_other_file(job: Path, tmp_path: Path) -> None:
    first = load_job(job, ["scaling={mode: schedule, profile: a100-40g-8, max_workers: 2}"])
    assert first.scaling.profile is not None
    path = write(tmp_path, "here.yaml", dump(first.scaling.profile))
    second = load_job(job, [f"scaling={{mode: schedule, profile: {path}, max_workers: 2}}"])
    assert second == first
    path.unlink()
    assert reload(second, tmp_path) == first
    assert second.plan == first.plan


def test_a_fixed_size_is_what_it_was_whatever_is_known_of_devices(job: Path) -> None:
    assert load_job(job, ["scaling.profile=h200-8"]).plan == load_job(job).plan


@pytest.mark.parametrize(
    ("objective", "keeps"),
    [
        ("minimise: cost, deadline_hours: 110", lambda taken: taken.wall_clock_s <= 110 * 3600),
        ("minimise: time, budget_gpu_hours: 6100", lambda taken: taken.gpu_hours <= 6100),
        ("minimise: time, budget_usd: 8000", lambda taken: taken.cost <= 8000),
    ],
)
def test_an_objective_of_the_job_is_met(objective: str, keeps: Callable[[Estimate], bool]) -> None:
    scaling = f"scaling={{mode: fit_per_segment, profile: a100-40g-8, workers: 64, {objective}}}"
    config = load_job(JOBS / "paper" / "gpt3_1.3b_ltd.yaml", [scaling])
    plan, fixed, profile = config.plan, config.fixed_plan, config.scaling.profile
    assert profile is not None
    assert plan.resizes
    assert keeps(estimate(plan, profile))
    assert estimate(plan, profile).gpu_hours < estimate(fixed, profile).gpu_hours


@pytest.mark.parametrize(
    ("whole", "dropped"),
    [
        ("none", (0, 1, 2, 3)),
        ("first", (1, 2, 3)),
        ("last", (0, 1, 2)),
        ("first_and_last", (1, 2)),
        ("[1, -1]", (0, 2)),
    ],
)
def test_layers_are_left_whole_by_name_or_by_number(job: Path, whole: str, dropped: tuple[int, ...]) -> None:
    config = load_job(job, [f"drop.full_length_layers={whole}"])
    assert dropped_layers(config.drop.spans(4), 4) == dropped
    plan = config.plan
    kept = sum(plan.at(step).kept_length for step in range(160))
    assert plan.layer_tokens(160) == 16 * (256 * 160 * (4 - len(dropped)) + kept * len(dropped))


def test_kept_lengths_may_be_given_stage_by_stage(job: Path) -> None:
    stages = "[{at: 0, kept: 32}, {at: 12.6%, kept: 100}, {at: 50%, kept: 256}]"
    plan = load_job(job, [f"drop.schedule={{kind: piecewise, stages: {stages}}}"]).plan
    assert [plan.at(step).kept_length for step in (0, 19, 20, 79, 80, 159)] == [32, 32, 100, 100, 256, 256]


def test_a_job_with_secrets_is_shown_and_written_without_them(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    config = load_job(job, ["data.corpus=[s3://key:secret@bucket/x.jsonl]", "track.uri=https://user:password@host"])
    assert config.data.corpus == ("s3://key:secret@bucket/x.jsonl",)
    written = write(tmp_path, "hidden.yaml", dump_job(config))
    for text in (repr(config), str({"task": config}), written.read_text()):
        assert "secret" not in text
        assert "password" not in text
    with pytest.raises(
        UserError, match=r"data\.corpus\[0\]: s3://<hidden>@bucket/x\.jsonl: its secret was not written"
    ):
        load_job(written)
    again = "data.corpus=[s3://key:secret@bucket/x.jsonl]"
    with pytest.raises(
        UserError, match=r"track\.uri: https://<hidden>@host: .* track\.uri=\.\.\. on the command line, or"
    ):
        load_job(written, [again])
    assert load_job(written, [again, "track.uri=https://user:password@host"]) == config
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert load_job(written, ["track.uri=null"]).data.corpus == ("s3://bucket/x.jsonl",)
    assert load_job(written, to_run=False).track.uri == "https://<hidden>@host"


def test_the_plan_of_a_job_is_laid_out_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []

    def counted(**parts: Any) -> RunPlan:
        laid_out.append(parts["steps"])
        return build_plan(**parts)

    monkeypatch.setattr(experiment, "build_plan", counted)
    config = load_job(job)
    assert config.plan is config.plan == config.fixed_plan
    assert laid_out == [config.steps]
