"""A run on token shards in S3: that of the folder which was copied there, bit for bit."""

import os
from pathlib import Path

import pytest

from kills import Command, audited
from runs import config_of, losses, write_job
from stores import S3
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch.resume import check_same_rows, shards_at_hand
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import run_training
from tokendrop.track.run_folder import open_run_folder

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_on_shards_in_s3_has_the_losses_of_the_local_folder(tmp_path: Path, s3: S3, workers: int) -> None:
    job, size = write_job(tmp_path), f"scaling.workers={workers}"
    here = Path(run_training(config_of(job, size), fit=fit_in_this_process if workers == 1 else None)["run"])
    _, folder = open_run_folder(here)
    uri = s3.upload(folder, "corpus")
    (tmp_path / "corpus.jsonl").unlink()
    shards = {f"/bucket/corpus/{path.name}" for path in folder.glob("*.arrow")}

    s3.app.answers.clear()
    settings = (f"data.folder={uri}", f"data.cache.folder={tmp_path}/cache", f"runs_folder={tmp_path}/far")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with Command("train", job, size, "run=far", *settings, environment=environment) as command:
        command.finish()
    assert "read     " in command.said()
    far = tmp_path / "far" / "far"
    assert losses(far) == losses(here)
    assert audited(far) == (0, 0)
    fetched = {path: count for path, count in s3.app.answers.items() if path in shards}
    assert set(fetched.values()) == {2}  # for all workers once: its size is asked, and all of it

    config, data = open_run_folder(far)
    assert config.data.folder == uri
    assert shards_at_hand(load_job(job, settings), far) == data
    check_same_rows(here, data)
    check_same_rows(far, data)
    other = data.rename(data.with_name("another name of other rows"))
    with pytest.raises(UserError, match=r"^data\.folder: \S+ began with other token shards; want those of s3://"):
        check_same_rows(far, other)
