"""`tokendrop runs`: runs are listed, filtered, shown and compared as their folders have them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from recorded import record
from tokendrop.atomic import exclusive_lock
from tokendrop.cli.main import main
from tokendrop.report.listing import find_runs, job_tree, overview
from tokendrop.track.journal import METRICS, note_loss
from tokendrop.track.run_folder import JOB, PLAN, open_run_folder, summarize


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, one that drops nothing, and one that ended in the middle, in a folder of a sweep."""
    folder = tmp_path / "runs"
    record(folder / "a-drops")
    record(folder / "b-whole", drop={"method": "none"})
    record(folder / "sweep" / "c-short", seed=7, last=5)
    (folder / "data").mkdir()
    return folder


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, object]]:
    main(["runs", *map(str, arguments), "--json"])
    return {Path(run["run"]).name: run for run in json.loads(capsys.readouterr().out)["runs"]}


def test_the_list_agrees_with_the_summaries_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, runs)
    assert list(found) == ["a-drops", "b-whole", "c-short"]
    for name in ("a-drops", "b-whole"):
        summary = summarize(runs / name)
        assert {key: found[name][key] for key in ("val_loss", "layer_token_saving")} == {
            key: summary[key] for key in ("val_loss", "layer_token_saving")
        }
        assert (found[name]["step"], found[name]["steps"], found[name]["state"]) == (12, 12, "finished")
    assert found["b-whole"]["layer_token_saving"] == 0 < found["a-drops"]["layer_token_saving"]
    assert (found["c-short"]["step"], found["c-short"]["state"]) == (5, "stopped")


def test_a_run_is_running_while_a_driver_is_at_work_and_failed_when_workers_were_lost_last(runs: Path) -> None:
    run = runs / "sweep" / "c-short"
    with exclusive_lock(run):
        assert overview(run).state == "running"
    note_loss(run, "rank 0")
    assert overview(run).state == "failed"
    record(run, seed=7, first=5)
    assert overview(run).state == "finished"


def test_the_last_loss_is_found_however_long_ago_it_was(tmp_path: Path) -> None:
    run = record(tmp_path / "run", last=8)
    line = json.dumps({**json.loads((run / METRICS).read_text().splitlines()[-1]), "val_loss": None})
    with (run / METRICS).open("a") as file:
        file.write(f"{line}\n" * 3000)
    assert overview(run).val_loss == summarize(run)["val_loss"]


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("drop.method=random_ltd", {"a-drops", "c-short"}),
        ("drop.method!=random_ltd", {"b-whole"}),
        ("seed=7", {"c-short"}),
        ("train.peak_lr=1e-2", {"a-drops", "b-whole", "c-short"}),
        ("state=finished", {"a-drops", "b-whole"}),
        ("step<12", {"c-short"}),
        ("layer_token_saving>0", {"a-drops", "c-short"}),
        ("train.lr_clock>3", set()),
    ],
)
def test_conditions_choose_runs(runs: Path, capsys: pytest.CaptureFixture[str], condition: str, names: set) -> None:
    assert listed(capsys, runs, "--where", condition).keys() == names


def test_all_conditions_hold_at_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, runs, "--where", "drop.method=random_ltd", "--where", "seed=7").keys() == {"c-short"}


def test_what_can_not_be_listed_is_one_sentence(runs: Path, complaint) -> None:
    assert complaint("runs", runs / "nowhere") == (
        f"{runs}/nowhere: no such folder; want a run folder, or a folder of them"
    )
    said = complaint("runs", runs, "--where", "drop.metod=x")
    assert said == "--where: drop.metod: no run here has this key; did you mean drop.method?"
    assert complaint("runs", runs, "--where", "drop").startswith("--where: want KEY=VALUE, ")
    assert complaint("runs", "show", runs / "data").startswith(f"{runs}/data: not a run folder")


def test_damaged_and_empty_runs_are_listed_beside_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "b-whole" / PLAN).write_text("{")
    (runs / "a-drops" / METRICS).unlink()
    found = listed(capsys, runs)
    assert {name: run["state"] for name, run in found.items()} == {
        "a-drops": "stopped",
        "b-whole": "damaged",
        "c-short": "stopped",
    }
    main(["runs", str(runs)])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


def test_a_folder_without_a_run_is_named(tmp_path: Path, complaint) -> None:
    assert complaint("runs", tmp_path).startswith(f"{tmp_path}: no run folder in it; want one that ")
    assert find_runs(tmp_path) == []


def test_a_job_read_fast_is_the_job(runs: Path) -> None:
    job = job_tree(runs / "a-drops")
    config = open_run_folder(runs / "a-drops")[0]
    assert (job["name"], job["drop.method"], job["seed"]) == (config.name, config.drop.method, config.seed)
    assert job["model.width"] == asdict(config.model)["width"]


def test_show_has_what_the_run_came_to_and_its_job(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "show", str(runs / "a-drops"), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["results"]["val_loss"] == summarize(runs / "a-drops")["val_loss"]
    assert shown["job"]["drop.method"] == "random_ltd"
    main(["runs", "show", str(runs / "sweep" / "c-short")])
    assert "5/12" in capsys.readouterr().out


def test_the_difference_of_two_runs_is_in_the_keys_that_differ(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "diff", str(runs / "a-drops"), str(runs / "b-whole"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["keys"]["drop.method"] == ["random_ltd", "none"]
    assert all(key.startswith("drop.") for key in found["keys"])
    assert found["results"]["layer_token_saving"][1] == 0
    main(["runs", "diff", str(runs / "a-drops"), str(runs / "a-drops")])
    assert "The jobs of both are the same." in capsys.readouterr().out


def test_a_job_is_not_needed_to_name_a_run(runs: Path) -> None:
    (runs / "a-drops" / JOB).write_text("[")
    assert (overview(runs / "a-drops").name, overview(runs / "a-drops").state) == ("a-drops", "damaged")
