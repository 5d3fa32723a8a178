"""A run of several attempts, for audits."""

import pytest

from ledgers import Run, make_run
from tokendrop.track.audit import Stretch, audit


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
