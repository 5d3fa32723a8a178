"""Token shards of a store through the cache of a node: what comes is what is there, within the bytes that are given."""

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import bytes_in, in_no_time, names, opened, stored, train_shards, until
from folders import data_config
from images import MODEL, TASK, write_images
from stores import Flaky, by_chance, flaky_store
from tiny import experiment
from tokendrop.atomic import exclusive_lock
from tokendrop.data.read import row_reader
from tokendrop.data.read.row_reader import MappedSamples, Rows, sample_order
from tokendrop.data.shards.cache import ShardCache
from tokendrop.data.shards.format import MANIFEST, ORIGIN, SHARDS, TOKENIZER


@pytest.fixture(scope="module", autouse=True)
def _in_no_time() -> Iterator[None]:
    with in_no_time():
        yield


@settings(max_examples=15)
@given(
    shards=st.integers(1, 8),
    room=st.integers(1, 9),
    asked=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 9),
)
def test_what_comes_is_what_is_there_and_never_more_bytes_are_kept_than_may_be(shards, room, asked, share, seed):
    faults = {"delay_s": 0.002, "fails": by_chance(share, seed)}
    with stored(shards, **faults) as (_, uri, cache, size):
        most = room * size
        folder, is_over, seen = opened(uri, cache, most), threading.Event(), [0]

        def read(numbers: list[int]) -> list[list[int]]:
            return Rows(folder, "train").read(np.array(numbers) % (2 * shards)).tolist()

        def watch() -> None:
            while not is_over.is_set():
                seen.append(bytes_in(cache))
                time.sleep(0.001)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with ThreadPoolExecutor(len(asked)) as pool:
                found = list(pool.map(read, asked))
        finally:
            is_over.set()
            watching.join()
        assert found == [[[number % (2 * shards)] * 5 for number in numbers] for numbers in asked]
        assert max(seen) <= most
        if room > shards:
            needed = {f"corpus-train-{number % (2 * shards) // 2:05}.arrow" for one in asked for number in one}
            assert {file: count for file, count in Flaky.read.items() if file.endswith(".arrow")} == dict.fromkeys(
                needed, 1
            )


@settings(max_examples=20)
@given(
    room=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 5)), st.booleans()), max_size=25),
)
def test_what_was_needed_longest_ago_goes_first_and_what_is_fetched_ahead_pushes_out_nothing_needed_soon(room, steps):
    """Against a model: names in the order of their last need."""
    with stored(6) as (_, uri, cache, _):
        shards = train_shards(opened(uri, cache))
        size = max(shard.bytes for shard in shards)
        here = ShardCache(opened(uri, cache, room * size))
        model: list[str] = []
        for number, others, is_ahead in steps:
            shard = shards[number]
            soon = {shards[one].file for one in others} | {shard.file}
            if is_ahead:
                here.fetch_ahead(shard, soon)
            else:
                here.fetch(shard, soon=soon)
            if shard.file in model:
                model.remove(shard.file)
            elif len(model) == room:
                going = next((one for one in model if one not in soon), None if is_ahead else model[0])
                if going is None:
                    continue
                model.remove(going)
            model.append(shard.file)
            assert names(here.folder) == set(model)


def test_a_shard_that_is_needed_again_outlives_one_that_came_later():
    with stored(4) as (_, uri, cache, size):
        here = ShardCache(opened(uri, cache, 3 * size))
        for number in (0, 1, 2, 1, 0, 3):
            here.fetch(train_shards(here.folder)[number])
        assert names(here.folder) == {f"corpus-train-{number:05}.arrow" for number in (0, 1, 3)}


def test_room_that_was_taken_during_a_download_ahead_stays_taken(monkeypatch):
    with stored(2) as (_, uri, cache, size):
        here = ShardCache(opened(uri, cache, size))
        one, other = train_shards(here.folder)
        here.fetch(one)
        monkeypatch.setattr(here, "_has_room", lambda size, soon: True)  # as it was before the download
        here.fetch_ahead(other, {one.file, other.file})
        assert names(here.folder) == {one.file}


def test_what_a_killed_process_left_makes_room():
    with stored(2) as (_, uri, cache, size):
        here = ShardCache(opened(uri, cache, size))
        left = here.folder / ".corpus-train-00001.arrow.0123abcd"
        left.write_bytes(bytes(size))
        here.fetch(train_shards(here.folder)[0])
        assert not left.exists()
        assert bytes_in(cache) <= size


def test_nothing_is_written_while_another_process_removes_left_overs():
    """What is half written looks like what a killed process left."""
    with stored(2) as (_, uri, cache, size):
        folder = opened(uri, cache, size)
        before = (folder / ORIGIN).read_bytes()
        with ThreadPoolExecutor(1) as pool:
            with exclusive_lock(cache):
                other = pool.submit(opened, uri, cache, 2 * size, name=folder.name)
                time.sleep(0.2)
                assert not other.done()
                assert {path.name for path in folder.iterdir()} == {MANIFEST, SHARDS, TOKENIZER, ORIGIN}
                assert (folder / ORIGIN).read_bytes() == before
            assert other.result() == folder
        assert ShardCache(folder).max_bytes == 2 * size


def test_a_shard_that_is_removed_stays_readable_where_it_is_mapped_and_comes_again_where_it_is_not():
    with stored(3) as (_, uri, cache, size):
        folder = opened(uri, cache, size)
        rows, others = Rows(folder, "train"), Rows(folder, "train")
        assert rows.read(np.array([0])).tolist() == [[0] * 5]
        assert others.read(np.array([4])).tolist() == [[4] * 5]
        assert names(folder) == {"corpus-train-00002.arrow"}
        assert rows.read(np.array([1])).tolist() == [[1] * 5]
        assert others.read(np.array([2, 1])).tolist() == [[2] * 5, [1] * 5]
        assert Flaky.read["corpus-train-00000.arrow"] == 2


def test_the_next_shards_come_before_they_are_asked_for_and_none_beyond_the_end(monkeypatch):
    monkeypatch.setattr(row_reader, "_BLOCK", 8)
    order = sample_order(data_config(shuffle_rows=8), seed=3)
    with stored(40, delay_s=0.01) as (prepared, uri, cache, _):
        here = MappedSamples(Rows(prepared, "train"), order)
        samples = MappedSamples(Rows(opened(uri, cache), "train"), order, end=64)
        for block, last in ((0, 3 * 8), (5, 64), (7, 64)):
            first = block * 8
            ids, rows = samples.at(np.arange(first, first + 2))
            assert ids.tolist() == here.at(np.arange(first, first + 2))[0].tolist()
            assert (rows == ids[:, None]).all()
            wanted = {f"corpus-train-{number:05}.arrow" for number in range(first // 2, last // 2)}
            until(lambda wanted=wanted: wanted <= names(samples.rows.folder))
            before = Flaky.read.copy()
            for position in range(first, first + 8):
                samples.at(np.array([position]))
            assert Flaky.read == before
        time.sleep(0.1)
        assert names(samples.rows.folder) == {f"corpus-train-{n:05}.arrow" for n in (*range(12), *range(20, 32))}
        assert set(Flaky.read.values()) == {1}


def test_a_run_through_more_than_there_is_room_for_keeps_no_removed_shard_mapped(monkeypatch):
    """So the disk has no more of them than `max_bytes` and those of the last blocks."""
    monkeypatch.setattr(row_reader, "_BLOCK", 8)
    order = sample_order(data_config(shuffle_rows=8), seed=3)
    with stored(60) as (_, uri, cache, size):
        folder = opened(uri, cache, 16 * size)
        samples = MappedSamples(Rows(folder, "train"), order, end=120)
        for position in range(120):
            ids, rows = samples.at(np.array([position]))
            assert (rows == ids[:, None]).all()
            mapped = re.findall(rf"{folder}/\S+ \(deleted\)", Path("/proc/self/maps").read_text())
            assert len(mapped) <= 4  # of one block
            assert bytes_in(cache) <= 16 * size


def test_images_through_the_cache_are_those_in_the_folder(tmp_path):
    write_images(tmp_path / "prepared", 40)
    keys = {"data__shuffle_rows": 10, "evaluate__sequences": 4, "drop": {"method": "none"}}
    config = experiment(model=MODEL, task=TASK, **keys)
    with flaky_store(tmp_path / "prepared", fails=by_chance(0.3, 1)) as uri:
        task = config.task.build(config)
        here, there = (task.open(folder) for folder in (tmp_path / "prepared", opened(uri, tmp_path / "cache", 20_000)))
        for positions in (np.arange(9), np.arange(30, 48), np.arange(100, 104)):
            one, other = (opened.batch(*opened.samples.at(positions), 1) for opened in (here, there))
            for key, value in one.inputs().items():
                assert value.equal(other.inputs()[key])
        for one, other in zip(here.held_out(), there.held_out(), strict=True):
            assert one.tolist() == other.tolist()


def test_two_folders_of_one_cache_share_its_bytes():
    with stored(4) as (_, uri, cache, size):
        one = ShardCache(opened(uri, cache, 3 * size))
        for shard in train_shards(one.folder)[:3]:
            one.fetch(shard)
        with stored(5) as (_, uri, _, _):
            other = ShardCache(opened(uri, cache, 3 * size))
            assert other.folder != one.folder
            for shard in train_shards(other.folder)[:2]:
                other.fetch(shard)
        assert names(one.folder) == {"corpus-train-00002.arrow"}
        assert names(other.folder) == {"corpus-train-00000.arrow", "corpus-train-00001.arrow"}
        assert bytes_in(cache) <= 3 * size


def test_numbers_of_threads_do_not_grow_with_readers():
    before = threading.active_count()
    with stored(3) as (_, uri, cache, _):
        folder = opened(uri, cache)
        for seed in range(2):
            samples = MappedSamples(Rows(folder, "train"), sample_order(data_config(shuffle_rows=4), seed=seed), end=6)
            samples.at(np.array([random.Random(seed).randrange(6)]))
        del samples
        until(lambda: threading.active_count() <= before)
