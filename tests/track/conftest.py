"""A store with S3's protocol, and addresses in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stores import S3, s3_server
from tokendrop.data.shards import store
from tokendrop.track.run_store import PLACE


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        patch.setattr(store, "_FIRST_PAUSE_S", 0.01)
        for name, value in S3.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def runs(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address for runs, which no other test has."""
    monkeypatch.setenv(PLACE, str(tmp_path / "here"))
    yield s3.uri(f"bucket/{tmp_path.name}")
    s3.app.trouble = lambda method, path: None
