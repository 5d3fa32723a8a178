"""Every panel has something to show of real runs that a real Prometheus has scraped."""

import shutil
import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import pytest

from boards import FOLDER, NAMES, filled, marks, panels, queries
from corpora import documents, tiny_job, write_corpus
from prometheus import Prometheus, scraping
from runs import config_of, write_job
from scraped import targets
from tokendrop.cli.main import main
from tokendrop.launch.trainer import run_training

pytestmark = [pytest.mark.ray, pytest.mark.schedule, pytest.mark.long, pytest.mark.timeout(600)]

SETTLED_S = 12.0  # until Ray's processes have reported once more
RUN, SWEEP = "elastic", "told"


@pytest.fixture(scope="module")
def seen(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Prometheus:
    """What has scraped a run whose workers change, and a sweep of two trials; it goes on."""
    if (command := shutil.which("prometheus")) is None:
        pytest.skip("no prometheus here")
    folder = tmp_path_factory.mktemp("panels")
    with scraping(command, folder, targets(), FOLDER / "rules.yaml") as found:
        train_elastic(folder)
        train_sweep(folder / "sweep")
        time.sleep(SETTLED_S)
        yield found


def train_elastic(folder: Path) -> None:
    """A run of 30 s on one worker, then two."""
    often = ("train.length=1400 steps", "checkpoint.every=10%", "evaluate.every=10%", f"run={RUN}")
    plan = "scaling.segments=[{from: 0, workers: 1}, {from: 50%, workers: 2}]"
    run_training(config_of(write_job(folder), *often, "scaling.mode=schedule", plan, "scaling.profile=a100-40g-8"))


def train_sweep(folder: Path) -> None:
    """A sweep whose trials take long enough to be seen."""
    folder.mkdir()
    job = {"train": {"length": "800 steps"}, "evaluate": {"every": "20%"}}
    tiny_job(folder, [write_corpus(folder / "corpus.jsonl", documents(80))], **job)
    (folder / "sweep.yaml").write_text(f"{{base: job.yaml, name: {SWEEP}, seeds: 2, most_at_once: 1}}")
    main(["sweep", str(folder / "sweep.yaml"), "--json"])


QUERIES = [one for name in NAMES for one in queries(name)]
UNITS = {
    f"{name}: {panel['title']} {target['refId']}": panel["fieldConfig"]["defaults"].get("unit")
    for name in NAMES
    for panel in panels(name)
    for target in panel["targets"]
}
LEAST: dict[str | None, Callable[[str], float]] = {
    "percentunit": lambda where: 0,
    "s": lambda where: -1e9 if "Behind" in where else 0,
    "h": lambda where: 0,
    "currencyUSD": lambda where: 0,
    "short": lambda where: 0,
}
"""Of what is shown in a unit."""
MOST_SHARE = 1.3  # a rate over values that come every 10 s is off by a part of these


def numbers(found: Prometheus, query: str) -> list[float]:
    """All finite values of a query, of the chosen run and sweep."""
    chosen = filled(query, run=RUN if "$sweep" in query and "$run" in query else ".*")
    return [value for _, points in found.since_it_began(chosen) for _, value in points if isfinite(value)]


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_panel_has_an_answer_for_a_real_run(seen: Prometheus, where: str, query: str) -> None:
    values = numbers(seen, query)
    assert values, "nothing to show"
    if least := LEAST.get(UNITS[where]):
        assert min(values) >= least(where)
    if UNITS[where] == "percentunit":
        assert max(values) <= MOST_SHARE


def test_a_change_of_workers_and_checkpoints_are_marked_and_no_restart(seen: Prometheus) -> None:
    found = {where: bool(numbers(seen, query)) for where, query in marks("training")}
    assert found == {
        "training: Changes of workers": True,
        "training: Checkpoints": True,
        "training: Restarts": False,
    }


def test_workers_are_one_then_two_and_each_is_seen(seen: Prometheus) -> None:
    query = dict(queries("scaling"))["scaling: Workers A"]
    sizes = [*dict.fromkeys(numbers(seen, query))]
    assert sizes == [1.0, 2.0]
    ranks = {tags["rank"] for tags, _ in seen.since_it_began(f'ray_tokendrop_rank_step_time_s{{run="{RUN}"}}')}
    assert ranks == {"0", "1"}


def test_rules_are_evaluated_and_a_healthy_run_alerts_nobody(seen: Prometheus) -> None:
    recorded = seen.since_it_began(f'tokendrop:tokens_per_s:avg10m{{run="{RUN}"}}')
    assert recorded
    healthy = f'ALERTS{{run="{RUN}", alertname!="TokendropDiskNearlyFull"}}'  # this machine's disk is its own affair
    assert seen.since_it_began(healthy) == []
