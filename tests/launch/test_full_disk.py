"""A disk that fills up is named at once, and what was saved before goes on from there."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import config_of, losses, write_job
from tokendrop.cli.main import main
from tokendrop.launch.trainer import run_training

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("to mount a file system, tests need to be root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_is_named_at_once_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)
    keep_all = ("checkpoint.keep=99", "checkpoint.every=1 steps")
    runs = (*keep_all, f"runs_folder={small_disk}", f"data.folder={tmp_path}/data", "run=full")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(job), *runs])
    assert ended.value.code == 1
    said = capfd.readouterr().err
    run = small_disk / "full"
    assert said.splitlines()[-1] == (
        f"tokendrop: {run}: can't be written (No space left on device); what is committed stays;"
        f" with room there, 'tokendrop train --resume {run}' goes on"
    )
    assert "Traceback" not in said
    assert "restart  " not in said
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    main(["train", "--resume", str(run)])
    undisturbed = run_training(config_of(job, *keep_all))
    assert losses(run) == losses(Path(undisturbed["run"]))
