"""The studies of the paper: their files, and what becomes of a verdict on its way into the table."""

import json
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps import DROPS, trials_of, write_sweep
from tokendrop.cli.main import main
from tokendrop.cli.reproduce import command_text
from tokendrop.study.claim import Claim
from tokendrop.study.evidence import Evidence, is_whole, markdown, mean_slope, read_evidence, size_text, write_evidence
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord
from tokendrop.study.studies import SCALES, Study, load_studies, load_study, sweep_of
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trials import expand
from tokendrop.study.verdict import judged

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "jobs" / "studies"
TABLE = "| study | paper |"


def evidence(arm: list[float], against: list[float], *, margin: float = 0.0, lower: bool = True) -> Evidence:
    """Of a study `growth` with these values, seed by seed."""
    return Evidence(
        study="growth",
        scale="small",
        command="tokendrop reproduce growth --scale small",
        metric="val_loss",
        lower_is_better=lower,
        margin=margin,
        seeds=tuple(range(1234, 1234 + len(arm))),
        arm=tuple(arm),
        against=tuple(against),
        layer_tokens=(1e6, 2e6),
        loss_slope=-2.5e-4,
        hours=0.5,
        date="2026-01-01",
        packages={"torch": "2.13.0"},
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_a_shipped_study_has_a_sweep_with_a_claim_at_each_of_its_scales(name: str) -> None:
    study, path = load_study(name, STUDIES)
    scales = [scale for scale in SCALES if study.file_at(scale)]
    sweeps = {scale: sweep_of(study, path, scale)[0] for scale in scales}
    assert all(sweep.claim is not None for sweep in sweeps.values())
    assert "small" not in sweeps or sweeps["small"].seeds == 5


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_a_shipped_study_can_be_tried_in_a_few_steps_at_each_of_its_scales(name: str) -> None:
    study, path = load_study(name, STUDIES)
    for scale in (scale for scale in SCALES if study.file_at(scale)):
        sweep, file = sweep_of(study, path, scale, smoke=True)
        trials = expand(sweep, file)
        assert {str(trial.config.train.length) for trial in trials} == {"50 steps"} or sweep.budget
        assert len({trial.config.seed for trial in trials}) == 2


def test_every_table_and_figure_with_results_has_a_study() -> None:
    named = " ".join(study.paper for study in load_studies(STUDIES).values())
    tables = ["1", "2", "3", "4", "5", "6", "7", "8", "E.1", "F.1", "H.1", "H.2", "H.3", "H.4", "H.5", "I.2"]
    sections = ["4.1", "4.2", "4.3", "5.1", "5.2", "5.3", "5.5", "5.6", "5.7"]
    words = named.replace(",", " ").split()
    assert [place for place in [*tables, *sections] if place not in words] == []


values = st.lists(st.floats(1, 5), min_size=2, max_size=6)


@settings(max_examples=20)
@given(arm=values, noise=st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=6), margin=st.floats(-1, 1), lower=...)
def test_a_verdict_that_is_kept_is_that_of_the_sweep(
    tmp_path_factory: pytest.TempPathFactory, arm: list[float], noise: list[float], margin: float, lower: bool
) -> None:
    folder = tmp_path_factory.mktemp("studies")
    against = [one + other for one, other in zip(arm, noise, strict=False)]
    kept = evidence(arm, against, margin=margin, lower=lower)
    write_evidence(folder / "verdicts" / "growth.small.json", kept)
    assert read_evidence(folder) == {("growth", "small"): kept}
    trials = trials_of(write_sweep(folder, axes={"drop": [{"method": "none"}, DROPS]}, seeds=len(arm)))
    claim = Claim(arm={"drop.method": "random_ltd"}, against={"drop.method": "none"}, margin=margin)
    by_method = {
        "random_ltd": dict(zip(kept.seeds, arm, strict=True)),
        "none": dict(zip(kept.seeds, against, strict=True)),
    }
    summaries = {one.run: {"val_loss": by_method[one.config.drop.method][one.config.seed]} for one in trials}
    assert judged(claim, trials, summaries, "val_loss", lower=lower) == kept.verdict


def test_the_command_of_a_verdict_can_be_pasted_and_has_no_password() -> None:
    overrides = ["track.uri=https://me:secret@mlflow.host", "train.length=3 steps"]
    options = Namespace(name="growth", scale="small", smoke=False, overrides=overrides)
    text = command_text(options)
    assert "secret" not in text
    assert shlex.split(text)[:5] == ["tokendrop", "reproduce", "growth", "--scale", "small"]
    assert shlex.split(text)[-1] == "train.length=3 steps"


@pytest.mark.parametrize("failed", [None, 0, 3])
def test_a_study_is_whole_with_every_seed_of_both_arms(tmp_path: Path, failed: int | None) -> None:
    claim = {"arm": {"drop.method": "random_ltd"}, "against": {"drop.method": "none"}}
    path = write_sweep(tmp_path, axes={"drop": [{"method": "none"}, DROPS]}, seeds=2, claim=claim)
    progress = Progress(load_sweep(path), trials_of(path), SweepRecord(tmp_path / "runs", "tiny"))
    for place, run in enumerate(progress.trials):
        if place != failed:
            progress.finish(run, {"val_loss": 3.0})
    assert is_whole(progress) == (failed is None)


def test_the_table_has_a_line_for_each_study_with_its_values_or_why_there_are_none() -> None:
    studies = {
        "growth": Study(paper="table 6", claim="grows", printed="15.92 against 20.76", full="a.yaml", small="b.yaml"),
        "open": Study(paper="table 1", claim="as good", printed="38.9", full="a.yaml", note="by GPUs alone"),
    }
    text = markdown(studies, {("growth", "small"): evidence([3.0, 3.1, 3.2], [3.5, 3.61, 3.7])})
    growth, other = text.splitlines()[2:]
    assert (
        "val_loss 3.1 against 3.603, 1M against 2M layer tokens; 3 seeds, 0.50 h, 2026-01-01; pairs of seeds" in growth
    )
    assert (
        "differ by 0.0058 (std), their mean by 0.0033; at the end the training loss changes by -0.025 in 100" in growth
    )
    assert "agrees: worse by -0.503 (-0.518 to -0.489), margin 0" in growth
    assert other.endswith("| by GPUs alone | open |")


@pytest.mark.parametrize(
    ("arm", "full", "end"),
    [
        ([3.0, 3.6, 3.2], "a.yaml", "\nundecided here; on GPUs 'tokendrop reproduce growth --scale full' can decide"),
        ([3.0, 3.6, 3.2], None, "\nundecided here; a figure alone"),
        ([3.0, 3.1, 3.2], "a.yaml", "in 100 steps"),
    ],
    ids=["undecided", "undecided and no larger one", "decided"],
)
def test_a_study_that_can_not_decide_says_which_one_can(arm: list[float], full: str | None, end: str) -> None:
    study = Study(paper="table 6", claim="grows", printed="15.92", full=full, small="b.yaml", note="a figure alone")
    text = size_text(evidence(arm, [3.5, 3.4, 3.7]), study)
    assert text.startswith("noise: pairs of seeds differ by ")
    assert text.endswith(end)


@given(st.lists(st.none() | st.floats(-1, 1), max_size=6))
def test_the_slope_of_an_arm_is_the_mean_of_its_runs_that_have_one(slopes: list[float | None]) -> None:
    some = [slope for slope in slopes if slope is not None]
    found = mean_slope([{"loss_slope": slope} for slope in slopes] + [{}])
    assert found == (pytest.approx(sum(some) / len(some)) if some else None)


def test_the_readme_has_the_verdicts_that_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "table", "--studies", str(STUDIES)])
    lines = (ROOT / "jobs" / "README.md").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(TABLE))
    table = capsys.readouterr().out.splitlines()
    assert lines[begin : begin + len(table)] == table


def test_a_verdict_that_is_kept_is_of_the_claim_of_its_sweep() -> None:
    for (name, scale), kept in read_evidence(STUDIES).items():
        study, file = load_study(name, STUDIES)
        sweep, _ = sweep_of(study, file, scale)
        assert sweep.claim is not None
        assert (kept.metric, kept.margin, len(kept.seeds)) == (sweep.metric, sweep.claim.margin, sweep.seeds)


def study_of(folder: Path, **keys: object) -> Path:
    """A study of a tiny sweep, in a folder of its own."""
    write_sweep(folder, axes={"drop": [{"method": "none"}, DROPS]}, seeds=2, **keys)
    (folder / "studies").mkdir()
    text = {"paper": "table 1", "claim": "as good", "printed": "none", "small": "../sweep.yaml", "note": "no GPUs"}
    (folder / "studies" / "tiny.yaml").write_text(yaml.safe_dump(text))
    return folder / "studies"


CLAIM = {"arm": {"drop.method": "random_ltd"}, "against": {"drop.method": "none"}}


@pytest.mark.parametrize(
    ("arguments", "keys", "said"),
    [
        (["tinny"], {"claim": CLAIM}, "no study 'tinny'; {0} has tiny; --studies names another folder"),
        (["tiny"], {}, "claim: a study wants one, with 'arm', 'against' and 'margin'"),
        (["tiny", "--scale", "full"], {"claim": CLAIM}, "has no such sweep: no GPUs"),
        (["tiny", "seed=1"], {"claim": CLAIM}, "the sweep itself gives 'seed'; want another key"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, arguments: list[str], keys: dict[str, object], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = study_of(tmp_path, **keys)
    with pytest.raises(SystemExit) as end:
        main(["reproduce", *arguments, "--studies", str(folder), "--dry-run"])
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said.format(folder) in line


def test_a_damaged_verdict_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = study_of(tmp_path, claim=CLAIM)
    (folder / "verdicts").mkdir()
    (folder / "verdicts" / "tiny.small.json").write_text(json.dumps({"study": "tiny"}))
    with pytest.raises(SystemExit):
        main(["reproduce", "list", "--studies", str(folder)])
    assert "tiny.small.json: no verdict of a study" in capfd.readouterr().err
