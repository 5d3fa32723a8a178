"""Files of a run that are written to a store: whole or not at all, by one try after the other."""

import resource
import threading
import time
from _thread import interrupt_main
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch.distributed as dist

from groups import together
from stored_runs import begun, elsewhere, save, state, written
from tokendrop.data.shards.store import StoredFolder
from tokendrop.errors import StorageError
from tokendrop.track import run_store
from tokendrop.track.journal import LEDGER, METRICS
from tokendrop.track.run_store import RunStore
from tokendrop.train.checkpoint import Checkpoints

DENIED = "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
MIB = 2**20


@pytest.mark.parametrize("size", [9, 9 * MIB])
def test_a_file_that_is_written_as_ctrl_c_comes_is_the_old_or_the_new_one(s3, runs, tmp_path, size):
    store, old, new = RunStore(runs), b"old" * size, b"new" * size
    (tmp_path / "new").write_bytes(new)
    for content in (new, tmp_path / "new"):
        store.put("file", old)
        is_sent = threading.Event()

        def trouble(method: str, path: str, is_sent: threading.Event = is_sent) -> None:
            if method in ("PUT", "POST") and not is_sent.is_set():
                is_sent.set()
                interrupt_main()
                time.sleep(0.2)

        s3.app.trouble = trouble
        with pytest.raises(KeyboardInterrupt):
            store.put("file", content)
        s3.app.trouble = lambda method, path: None
        assert store.read("file") in (old, new)


def test_a_large_file_that_can_not_be_read_to_its_end_is_not_there(s3, runs, monkeypatch):
    monkeypatch.setattr(run_store, "_HELD_BYTES", -1)  # or it would be read before it is written
    source = Path("/proc/self/mem")  # whose first page can't be read
    with pytest.raises(OSError, match="Input/output error"):
        RunStore(runs).put("file", source)
    assert RunStore(runs).files() == {}


def test_a_large_file_is_not_held_in_memory(s3, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "_HELD_BYTES", 16 * MIB)
    (tmp_path / "large").write_bytes(bytes(96 * MIB))
    s3.app.trouble = lambda method, path: time.sleep(0.3) if method == "PUT" else None
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.01):
            most = max(most, pa.total_allocated_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    RunStore(runs).put("large", tmp_path / "large")
    is_done.set()
    watcher.join()
    assert most < 48 * MIB
    assert RunStore(runs).files()["large"][0] == 96 * MIB


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a disk that is full does, but to this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_this_machine_s_disk_does_is_told_at_once_and_as_its_own(s3, runs, tmp_path):
    store, called = RunStore(runs, patience_s=30), time.monotonic()
    store.put("file", bytes(MIB))
    with files_of_at_most(MIB // 2), pytest.raises(OSError, match="File too large"):
        store.fetch("file", tmp_path / "file")
    assert not list(tmp_path.glob("*file*"))
    with pytest.raises(FileNotFoundError, match="gone"):
        store.put("file", tmp_path / "gone")
    assert time.monotonic() - called < 20


def test_a_request_that_takes_longer_than_the_patience_is_made_again(s3):
    tries = 0

    def ask() -> str:
        nonlocal tries
        tries += 1
        time.sleep(0.3)
        if tries == 1:
            raise OSError("reset by peer")
        return "answer"

    assert StoredFolder("s3://bucket", patience_s=0.2).asking("file", ask) == "answer"


def test_the_end_of_a_driver_writes_no_part_again(s3, runs):
    worker = begun(runs)
    driver = type(worker)(worker.folder)
    driver.begin()
    for step in (3, 6):
        save(worker, step)
    asked: list[str] = []
    s3.app.trouble = lambda method, path: asked.append(path) if method != "GET" else None
    driver.end()
    assert any(METRICS in path or "driver" in path for path in asked)
    assert not [path for path in asked if ".parquet/" in path and "rank" in path]


def test_what_was_cut_short_counts_not_and_is_written_again(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    save(home, 3)
    home = type(home)(home.folder)
    begin = (home.folder / METRICS).read_bytes().rfind(b"\n") + 1
    home.store.put(f"{LEDGER}/000000003-000000006-rank0.parquet", b"")
    home.store.put(f"{METRICS}/{begin:012}-{begin + 9:012}.jsonl", b"{")
    save(home, 6)
    there = elsewhere(runs, tmp_path / "there", monkeypatch)
    assert state(there) == (6, [3, 6])
    assert (there / LEDGER / "000000003-000000006-rank0.parquet").stat().st_size > 0
    lines = (there / METRICS).read_bytes()
    assert (home.folder / METRICS).read_bytes().startswith(lines)
    assert b'"paused_at": 6' in lines


def test_a_checkpoint_counts_though_older_ones_can_not_be_removed(s3, runs, tmp_path, capfd):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    checkpoints = Checkpoints(home.folder / "checkpoints", keep=1, meta={}, store=home)
    s3.app.trouble = lambda method, path: DENIED if method == "DELETE" else None
    final = written(home, 9)
    home.put(final / "weights.distcp")
    (final / "index.json").write_text("{}")
    done: Future[None] = Future()
    written_all: Future[None] = Future()
    written_all.set_result(None)
    checkpoints._commit(done, final, final.with_suffix(""), written_all)
    done.result()
    assert "note     older checkpoints stay: runs_folder: can't remove" in capfd.readouterr().err
    assert home.committed_step() == 9


class Refuses:
    """A store that does not let a run go on."""

    def cut(self, step: int) -> None:
        time.sleep(1)
        raise StorageError("it has a newer one")

    def put(self, file: Path) -> None: ...

    def commit(self, checkpoint: Path) -> None: ...

    def remove_old(self, keep: int) -> None: ...


def is_told(folder: Path) -> None:
    with pytest.raises(StorageError, match="it has a newer one"):
        Checkpoints(folder, keep=1, meta={}, store=Refuses()).go_on(3)
    (folder / str(dist.get_rank())).touch()


def test_what_rank_0_is_told_by_the_store_all_ranks_hear(tmp_path):
    together(2, is_told, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
