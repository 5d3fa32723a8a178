"""A real run is exported by Ray's agents with the values of its record, for as long as it goes on."""

import time
from pathlib import Path

import pytest

from corpora import documents, tiny_job, write_corpus
from runs import config_of, write_job
from scraped import OURS, exported, watching
from tokendrop.cli.main import main
from tokendrop.launch.trainer import run_training
from tokendrop.track.prometheus import legal_name
from tokendrop.track.run_metrics import MOST_SERIES

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

INTERVAL_S = 10.0  # of Ray's reports
FORGOTTEN_S = 4 * INTERVAL_S
SAME = {"progress/tokens": "tokens", "progress/layer_tokens": "layer_tokens", "loss/validation": "val_loss"}
SAME |= {"progress/step": "steps", "events/restarts": "restarts", "events/resizes": "resizes"}


@pytest.mark.long
def test_a_run_is_exported_with_what_it_came_to(tmp_path: Path) -> None:
    with watching(job_name="tiny") as prepared:
        result = run_training(config_of(write_job(tmp_path), "run=short", "track.ranks=false"))
        key, deadline = (f"{OURS}progress_step", (("run", "short"), ("sweep", ""))), time.monotonic() + 3 * INTERVAL_S
        while (found := exported(run="short")).get(key) != result["steps"] and time.monotonic() < deadline:
            time.sleep(0.5)
    values = {name: value for (name, tags), value in found.items() if "part" not in dict(tags)}
    assert {name: values[f"ray_{legal_name(name)}"] for name in SAME} == pytest.approx(
        {name: result[key] for name, key in SAME.items()}
    )
    assert len(found) == len(values) <= MOST_SERIES
    assert any(name.startswith(f"{OURS}prepare_") for name, _ in prepared)


@pytest.mark.long
def test_workers_are_exported_while_they_train_and_nothing_of_a_run_after_it(tmp_path: Path) -> None:
    rare = ("checkpoint.every=50%", "evaluate.every=50%", "train.length=1000 steps")
    with watching(run="seen") as seen:
        run_training(config_of(write_job(tmp_path), "run=seen", "scaling.workers=2", *rare))
    ranks = {(name, dict(tags)["rank"]) for name, tags in seen if "rank" in dict(tags)}
    assert ranks == {(f"{OURS}rank_{time}", rank) for time in ("step_time_s", "data_time_s") for rank in ("0", "1")}
    assert len([tags for _, tags in seen if "rank" not in dict(tags)]) <= MOST_SERIES
    time.sleep(FORGOTTEN_S)
    assert exported(run="seen") == {}


@pytest.mark.long
def test_the_trials_of_a_sweep_have_its_name_and_it_tells_how_far_it_is(tmp_path: Path) -> None:
    tiny_job(tmp_path, [write_corpus(tmp_path / "corpus.jsonl", documents(80))])
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("{base: job.yaml, name: told, seeds: 2, most_at_once: 1}")
    with watching(sweep="told") as seen:
        main(["sweep", str(sweep), "--json"])
        time.sleep(2 * INTERVAL_S)
    states = {dict(tags)["state"]: value for (name, tags), value in seen.items() if name == f"{OURS}sweep_trials"}
    assert states == {"finished": 2, "failed": 0, "stopped early": 0, "running": 0, "to train": 0}
    assert [dict(tags)["metric"] for name, tags in seen if name == f"{OURS}sweep_best"] == ["val_loss"]
    runs = {dict(tags)["run"] for name, tags in seen if name == f"{OURS}progress_step"}
    assert len(runs) == 2
    assert all(run.startswith("trial-") for run in runs)
