"""Token shards in S3, by its protocol: requests that are throttled or fail are made again."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from folders import numbered_rows, write_folder
from stores import INTERNAL, S3, SLOW_DOWN, s3_of_this_process
from tokendrop.config.data import CacheConfig
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.cache import ShardCache, open_stored
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError

SHARDS = 6


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_of_this_process() as server:
        yield server


@pytest.fixture
def uri(s3: S3, tmp_path: Path) -> Iterator[str]:
    """Of a folder of numbered rows."""
    write_folder(tmp_path / "prepared", numbered_rows(2 * SHARDS), rows_per_shard=2)
    yield s3.upload(tmp_path / "prepared", tmp_path.name)
    s3.app.error = lambda path, number: None


def opened(uri: str, cache: Path) -> Path:
    return open_stored(uri, CacheConfig(folder=str(cache)))


def test_requests_that_are_throttled_or_fail_are_made_again(s3, uri, tmp_path):
    answers = ("503 Slow Down", SLOW_DOWN), ("500 Internal Server Error", INTERNAL)
    s3.app.answers.clear()
    s3.app.error = lambda path, number: (
        answers[number % 2] if number <= 6 else None
    )  # the client itself asks fewer times
    folder = opened(uri, tmp_path / "cache")
    ShardCache(folder).check(read_manifest(folder))
    assert Rows(folder, "train").read(np.array([0, 3])).tolist() == [[0] * 5, [3] * 5]
    assert all(count > 6 for count in s3.app.answers.values())
    assert len(s3.app.answers) == 5  # the manifest's three files and two shards


def test_refused_credentials_are_told_at_once(s3, uri, tmp_path):
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    s3.app.answers.clear()
    s3.app.error = lambda path, number: ("403 Forbidden", denied)
    with pytest.raises(UserError, match=r"^data\.folder: can't read s3://bucket/\S+/manifest\.json \(.*ACCESS_DENIED"):
        opened(uri, tmp_path / "cache")
    assert set(s3.app.answers.values()) == {1}


@pytest.mark.parametrize("place", ["no-such-bucket/x", "bucket/nothing"])
def test_a_bucket_or_a_manifest_that_is_not_there_is_named(s3, tmp_path, place):
    with pytest.raises(UserError) as told:
        opened(s3.uri(place), tmp_path / "cache")
    assert str(told.value) == (
        f"data.folder: s3://{place}/manifest.json: there is no such file or bucket; want a folder that"
        " 'tokendrop prepare' made, copied there whole"
    )


def test_a_shard_that_was_not_copied_is_named(s3, uri, tmp_path):
    folder = opened(uri, tmp_path / "cache")
    s3.remove(f"bucket/{tmp_path.name}/corpus-train-00002.arrow")
    with pytest.raises(
        UserError, match=rf"s3://bucket/{tmp_path.name}/corpus-train-00002.arrow is missing or cut short"
    ):
        ShardCache(folder).check(read_manifest(folder))
    with pytest.raises(UserError, match=r"corpus-train-00002\.arrow: there is no such file or bucket"):
        Rows(folder, "train").read(np.array([4]))
