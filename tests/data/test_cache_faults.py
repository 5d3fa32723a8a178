"""Caches of token shards after deaths, damage, outages, and what was never right: a sentence or the right rows."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from caches import bytes_in, in_no_time, names, opened, stored, train_shards, until
from deaths import die_before
from folders import numbered_rows, write_folder
from stores import Flaky, flaky_store
from tokendrop.atomic import is_locked
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.cache import ShardCache
from tokendrop.data.shards.format import MANIFEST, SHARDS, TOKENIZER
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError, UserError


@pytest.fixture(scope="module", autouse=True)
def _in_no_time() -> Iterator[None]:
    with in_no_time():
        yield


def read_all(uri: str, cache: Path) -> list[list[int]]:
    """All rows, through a cache with room for one shard."""
    folder = opened(uri, cache, Path(f"{cache}.size").stat().st_size)
    return Rows(folder, "train").read(np.arange(4)).tolist()


def died(uri: str, cache: Path, number: int | None) -> list[str]:
    """What a process changes in a cache until SIGKILL ends it before the nth change, if any."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_before(number, cache, cache.with_suffix(".log"))
            read_all(uri, cache)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if number is None else -9)
    return cache.with_suffix(".log").read_text().splitlines()


def test_a_death_at_any_moment_costs_the_next_reader_nothing_and_leaves_nothing(tmp_path):
    write_folder(tmp_path / "prepared", numbered_rows(4), rows_per_shard=2)
    size = max(shard.bytes for shard in read_manifest(tmp_path / "prepared").shards)
    uri = f"file://{tmp_path}/prepared"

    def cache_of(number: object) -> Path:
        cache = tmp_path / f"cache-{number}"
        cache.mkdir()
        Path(f"{cache}.size").write_bytes(bytes(size))
        return cache

    changes = died(uri, cache_of("alive"), None)
    assert sum(change.startswith("rename") for change in changes) == 7  # four files, their folder, two shards
    for number in range(len(changes)):
        cache = cache_of(number)
        assert len(died(uri, cache, number)) == number + 1
        assert read_all(uri, cache) == [[row] * 5 for row in range(4)]
        assert not list(cache.glob(".arriving")), changes[number]
        (folder,) = (path for path in cache.iterdir() if not path.name.startswith("."))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], changes[number]
        assert bytes_in(cache) <= size


def test_a_process_that_is_killed_in_a_download_keeps_nobody_waiting():
    with stored(1, delay_s=0.0) as (_, uri, cache, _):
        folder = opened(uri, cache)
        Flaky.delay_s = 60.0
        pid = os.fork()
        if pid == 0:
            Rows(folder, "train").read(np.array([0]))
            os._exit(0)
        until(lambda: any(map(is_locked, cache.glob(".fetching/*"))))
        Flaky.delay_s = 0.0
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Rows(folder, "train").read, np.array([1]))
            time.sleep(0.1)
            assert not waiting.done()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert waiting.result(10).tolist() == [[1] * 5]


@pytest.mark.parametrize("times", [1, 3])
def test_a_download_that_is_damaged_is_tried_again_and_then_named(times):
    tries = itertools.count(1)
    with stored(2, damages=lambda path: path.endswith("train-00001.arrow") and next(tries) <= times) as (
        _,
        uri,
        cache,
        _,
    ):
        rows = Rows(opened(uri, cache), "train")
        if times == 1:
            assert rows.read(np.arange(4)).tolist() == [[number] * 5 for number in range(4)]
            return
        with pytest.raises(DamagedDataError) as caught:
            rows.read(np.arange(4))
        assert str(caught.value) == (
            "data.folder: flaky://copy/corpus-train-00001.arrow: damaged (its sha256 is not the manifest's), 3 times;"
            " want it copied there again"
        )
        assert names(rows.folder) == {"corpus-train-00000.arrow"}


def test_a_store_that_fails_on_is_named_after_a_bounded_time():
    is_down = threading.Event()
    with stored(2, fails=is_down.is_set) as (_, uri, cache, _):
        here = ShardCache(opened(uri, cache))
        here.store.patience_s = 0.2
        is_down.set()
        begun = time.monotonic()
        with pytest.raises(UserError) as caught:
            here.fetch(train_shards(here.folder)[0])
        assert 0.05 < time.monotonic() - begun < 2
        assert str(caught.value) == (
            "data.folder: can't read flaky://copy/corpus-train-00000.arrow, tried for 0.2 s (503 Slow Down)"
        )


def test_what_is_known_is_opened_without_the_store_and_what_changed_there_is_refused(tmp_path):
    with stored(2) as (_, uri, cache, _):
        folder = opened(uri, cache)
        Flaky.store.clear()
        assert opened(uri, cache, name=folder.name) == folder
        write_folder(tmp_path / "others", numbered_rows(6), rows_per_shard=2)
        with flaky_store(tmp_path / "others") as uri:
            with pytest.raises(UserError, match="flaky://copy: other token shards than when the run began; want those"):
                opened(uri, tmp_path / "another node", name=folder.name)
            assert opened(uri, cache) != folder


def damage_header(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def cut_lines(folder: Path) -> None:
    content = (folder / SHARDS).read_bytes()
    (folder / SHARDS).write_bytes(content[: content.index(b"\n") + 1])


def unfinished(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"is_complete": true', '"is_complete": false'))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: (folder / MANIFEST).unlink(),
            "flaky://copy/manifest.json: there is no such file or bucket; want",
        ),
        (damage_header, "flaky://copy/manifest.json: damaged ("),
        (cut_lines, "flaky://copy/shards.jsonl: damaged (its shards do not add up"),
        (unfinished, "flaky://copy: not prepared to the end; want all of it copied there once"),
        (lambda folder: (folder / TOKENIZER).write_text("[]"), "flaky://copy/tokenizer.json: damaged (its sha256"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_by_its_uri_and_leaves_nothing(tmp_path, spoil, said):
    write_folder(tmp_path / "prepared", numbered_rows(6), rows_per_shard=2)
    spoil(tmp_path / "prepared")
    with flaky_store(tmp_path / "prepared") as uri, pytest.raises(UserError) as caught:
        opened(uri, tmp_path / "cache")
    assert str(caught.value).startswith(f"data.folder: {said}")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert not [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".")]


def test_shards_that_were_not_copied_are_missed_before_training():
    with stored(5) as (_, uri, cache, _):
        here = ShardCache(opened(uri, cache))
        here.check(read_manifest(here.folder))
        for number in (1, 3):
            Flaky.store.pop(f"/copy/corpus-train-{number:05}.arrow")
        with pytest.raises(UserError) as caught:
            here.check(read_manifest(here.folder))
        assert str(caught.value) == (
            "data.folder: flaky://copy/corpus-train-00001.arrow is missing or cut short, and so are 1 more of 6 shards;"
            " want the whole folder copied there again"
        )


def test_a_store_whose_package_is_missing_names_the_command_that_installs_it(tmp_path):
    with pytest.raises(UserError) as caught:
        opened("az://container/folder", tmp_path / "cache")
    assert str(caught.value) == (
        "data.folder: can't read az://container/folder/manifest.json: want a package for it: pip install adlfs"
    )
