"""MLflow's pages of five runs, in a real browser: runs are found, overlaid and compared, and their files open."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from mlflow import MlflowClient

from browser import Page, browser, find_chromium
from checkouts import free_ports
from recorded import record
from runs import config_of, write_job
from servers import server
from tokendrop.cli.train import where_to_look
from tokendrop.launch.trainer import run_training
from tokendrop.track.mlflow import STATE, MlflowMirror
from tokendrop.track.run_folder import open_run_folder

pytestmark = [pytest.mark.ray, pytest.mark.long]

EXPERIMENT = "five runs"
NAMES = ["drops-1", "drops-2", "drops-3", "whole-1", "whole-2"]
TRAINING = "workflowType=machine_learning"
ITS_OWN = ("ajax-api/2.0/mlflow/users/current", "ResizeObserver loop completed with undelivered notifications")
"""What MLflow's page complains of whatever it shows: it has no users here, and its charts change their size."""


class Store(NamedTuple):
    """A server of MLflow, and what it has."""

    address: str
    experiment: str
    """Its id; those of runs by name."""
    runs: dict[str, str]
    trained: dict[str, Any]
    """The results of the one that was trained here."""

    @property
    def these_runs(self) -> str:
        """The part of an address by which pages compare all of them."""
        ids = [self.runs[name] for name in NAMES]
        return f"runs={quote(json.dumps(ids))}&experiments={quote(json.dumps([self.experiment]))}"


def train_one_and_record_four(folder: Path, uri: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The results of the first, and the id in MLflow of each run by name."""
    track = [f"track.uri={uri}", f"track.experiment={EXPERIMENT}", "track.tags={arm: drops}"]
    trained = run_training(config_of(write_job(folder), "name=drops-1", "run=drops-1", *track))
    folders = {"drops-1": Path(trained["run"])}
    for name in NAMES[1:]:
        arm, _, seed = name.partition("-")
        track = {"uri": uri, "experiment": EXPERIMENT, "tags": {"arm": arm}}
        drop = {} if arm == "drops" else {"drop": {"method": "none"}}
        folders[name] = record(folder / "runs" / name, seed=int(seed), name=name, track=track, **drop)
        MlflowMirror(folders[name], open_run_folder(folders[name])[0]).sync("FINISHED")
    return trained, {name: json.loads((run / STATE).read_text())["run_id"] for name, run in folders.items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Store]:
    find_chromium()
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/server.db"
    trained, runs = train_one_and_record_four(folder, uri)
    experiment = MlflowClient(uri).get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    (port,) = free_ports(1)
    with server(folder, port):
        yield Store(f"http://127.0.0.1:{port}/#", experiment.experiment_id, runs, trained)


@pytest.fixture
def page(store: Store, tmp_path: Path) -> Iterator[Page]:
    """A browser that has never seen MLflow; at the end no page has complained but as MLflow always does."""
    with browser(find_chromium(), tmp_path) as page:
        yield page
        assert [one for one in page.complaints if not any(its_own in one for its_own in ITS_OWN)] == []


def listed(page: Page) -> list[str]:
    """The names of the runs that a table has, as soon as it has any."""
    page.wait_for("matching runs")
    page.wait("[...document.querySelectorAll('a')].some(one => one.hash.includes('/runs/'))")
    links = page.ask("[...document.querySelectorAll('a')].map(one => one.innerText.trim())")
    return sorted({name for name in links if name in NAMES})


def wait_for_curves(page: Page) -> None:
    """Until the first chart has the loss of every run, each with its name below."""
    lines = "document.querySelector('.js-plotly-plot')?.querySelectorAll('.scatterlayer path.js-line').length"
    page.wait(f"{lines} >= {len(NAMES)}")
    page.wait_for(*(f"{name} (loss/train)" for name in NAMES))


def test_the_view_of_training_is_chosen_once_and_lists_the_runs(store: Store, page: Page) -> None:
    page.open(f"{store.address}/experiments")
    page.click("[role=button]", "Model training")
    page.click("a", EXPERIMENT)
    page.wait_for("5 matching runs", "Run Name")
    assert listed(page) == NAMES
    assert TRAINING in page.ask("location.hash")
    page.open(f"{store.address}/experiments/{store.experiment}")  # the browser remembers it
    page.wait_for("5 matching runs")
    page.picture("mlflow-runs")


def test_the_address_that_training_ends_with_opens_its_view(store: Store, page: Page, tmp_path: Path) -> None:
    job = config_of(write_job(tmp_path), f"track.uri={store.address.removesuffix('/#')}")
    (line,) = (line for line in where_to_look([store.trained], job).splitlines() if line.startswith("curves"))
    page.open(line.split()[1].removesuffix(","))
    page.wait_for("5 matching runs", "Run Name")
    assert TRAINING in page.ask("location.hash")


def test_an_address_opens_in_the_view_of_training_and_a_tag_finds_the_runs_that_have_it(
    store: Store, page: Page
) -> None:
    page.open(f"{store.address}/experiments/{store.experiment}?{TRAINING}")
    page.wait_for("5 matching runs")
    page.type("[data-testid=search-box]", "tags.arm = 'whole'")
    page.wait_for("2 matching runs")
    assert listed(page) == ["whole-1", "whole-2"]
    page.picture("mlflow-search")


def test_curves_of_five_runs_lie_over_each_other_by_step_and_by_layer_tokens(store: Store, page: Page) -> None:
    page.open(f"{store.address}/experiments/{store.experiment}/runs?compareRunsMode=CHART&{TRAINING}")
    page.wait_for("loss/train", "Step")
    wait_for_curves(page)
    shown = page.text
    sections = ["loss", "progress", "quality", "schedule", "speed", "training"]
    places = [shown.index(f"\n{name}\n(") for name in sections]
    assert places == sorted(places)
    page.picture("mlflow-charts")
    page.click("[aria-label='Configure charts']")
    page.click("[role=menuitem]", "Metric")
    page.click("[role=menuitemcheckbox]", "progress/layer_tokens")
    page.wait("document.querySelector('.js-plotly-plot .xtitle')?.textContent === 'progress/layer_tokens'")
    wait_for_curves(page)
    page.picture("mlflow-charts-by-layer-tokens")


def test_five_runs_are_compared_by_parallel_coordinates_and_by_a_metric(store: Store, page: Page) -> None:
    page.open(f"{store.address}/compare-runs?{store.these_runs}")
    page.wait_for("Comparing 5 Runs from 1 Experiment", "Parallel Coordinates Plot", "drop.method")
    assert page.wait("document.querySelectorAll('.parcoords .axis-title').length") >= 2
    page.wait_for(*NAMES)
    page.picture("mlflow-parallel-coordinates")
    keys = quote(json.dumps(["loss/train"]))
    page.open(f"{store.address}/metric?{store.these_runs}&metric=%22loss%2Ftrain%22&plot_metric_keys={keys}")
    wait_for_curves(page)


def test_files_of_a_run_open(store: Store, page: Page) -> None:
    run = f"{store.address}/experiments/{store.experiment}/runs/{store.runs['drops-1']}"
    page.open(f"{run}?{TRAINING}")
    page.wait_for("drops-1", "progress/layer_tokens", "drop.schedule.start", "Finished")
    page.picture("mlflow-run")
    page.open(f"{run}/artifacts/job.yaml?{TRAINING}")
    page.wait_for("environment.json", "plan.json", "name: drops-1", "method: random_ltd")
    page.picture("mlflow-artifact")
