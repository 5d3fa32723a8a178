"""`tokendrop fork` on Ray: a run, a fork of it, and MLflow, which knows where the fork comes from."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from runs import losses, write_job
from tokendrop.cli.main import main
from tokendrop.track.lineage import FORKED_AT, FORKED_FROM, FORKED_WITH

pytestmark = pytest.mark.ray


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_a_fork_is_trained_tracked_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, runs = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "runs"
    places = (f"runs_folder={runs}", f"data.folder={tmp_path}/data", "checkpoint.keep=4", "evaluate.sequences=8")
    main(["train", str(write_job(tmp_path)), *places, "run=parent", "train.length=6 steps", "track.uri=null"])
    child, fork = runs / "child", ["fork", str(runs / "parent"), "--at", "3", "run=child", "train.peak_lr=2e-3"]
    capsys.readouterr()
    main([*fork, f"track.uri={uri}", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["run"], result["steps"]) == (str(child), 6)
    assert (result["forked_from"], result["forked_at"]) == (str(runs / "parent"), 3)
    ours, theirs = losses(child), losses(runs / "parent")
    assert ours[:4] == theirs[:4]
    assert all(one != other for one, other in zip(ours[4:], theirs[4:], strict=True))

    for again in ([*fork, f"track.uri={uri}"], ["train", "--resume", str(child)]):
        main(again)
        assert losses(child) == ours
    client = MlflowClient(uri)
    (tracked,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert tracked.data.tags[FORKED_FROM] == "parent"
    assert tracked.data.tags[FORKED_AT] == "3"
    assert tracked.data.tags[FORKED_WITH].startswith("run=child train.peak_lr=2e-3 ")
    assert [point.step for point in client.get_metric_history(tracked.info.run_id, "loss/train")] == [4, 5, 6]
