"""A run of several attempts, for audits; a store with S3's protocol, and addresses in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ledgers import Run, make_run
from stores import S3, s3_of_this_process
from tokendrop.track.audit import Stretch, audit
from tokendrop.track.run_store import PLACE


@pytest.fixture(scope="module")
def resized(tmp_path_factory) -> Run:
    """Three attempts: 4 workers, then 1, then 2; its ledger is sound."""
    run = make_run(tmp_path_factory.mktemp("resized") / "run", rows=(7, 30))
    run.attempt(4, start=0, end=4)
    run.attempt(1, start=3, end=8)
    run.attempt(2, start=6)
    assert audit(run.folder).world_sizes == (
        Stretch(from_step=1, to_step=3, world_size=4),
        Stretch(from_step=4, to_step=6, world_size=1),
        Stretch(from_step=7, to_step=12, world_size=2),
    )
    return run


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_of_this_process() as server:
        yield server


@pytest.fixture
def runs(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address for runs, which no other test has."""
    monkeypatch.setenv(PLACE, str(tmp_path / "here"))
    yield s3.uri(f"bucket/{tmp_path.name}")
    s3.app.trouble = lambda method, path: None
