"""Ctrl-C ends a preparation within seconds, whatever it does just then."""

import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from corpora import byte_tokenizer, documents, json_lines, tiny_job, write_corpus
from kills import Command
from tokendrop.atomic import LOCK, exclusive_lock
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import find_corpus
from tokendrop.data.shards.format import SHARDS

pytestmark = [pytest.mark.ray, pytest.mark.alone]

ENDS_WITHIN_S = 10
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def ends(command: Command, what: Callable[[], bool], name: str, *, sent: signal.Signals = signal.SIGINT) -> None:
    """One press, once that has come true."""
    assert command.until(what, name)
    started = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(sent)
    assert command.wait(ENDS_WITHIN_S) == 130, command.said()
    assert "Traceback" not in command.said()
    assert command.said().endswith("tokendrop: stopped\n")
    assert psutil.wait_procs(started, timeout=ENDS_WITHIN_S)[1] == []


@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_while_a_vocabulary_is_learned(tmp_path: Path, verb: str) -> None:
    chance = random.Random(0)  # words without an end keep the trainer at work for very long
    words = ["".join(chr(0x4E00 + chance.randrange(3000)) for _ in range(100_000)) for _ in range(40)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(json_lines(words))
    with Command(verb, tiny_job(tmp_path, [corpus]), environment=ALONE) as command:
        ends(command, lambda: psutil.Process(command.pid).cpu_times().user > 20, "the trainer")


def test_while_another_process_prepares_the_same(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    job = tiny_job(tmp_path, [corpus], data={"tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json"))})
    folder = find_corpus(load_job(job)).folder
    with exclusive_lock(folder), Command("prepare", job, environment=ALONE) as command:
        lock = str(folder / LOCK)
        ends(command, lambda: lock in {one.path for one in psutil.Process(command.pid).open_files()}, "the lock")


def test_while_a_store_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        query = f"endpoint_override=127.0.0.1%3A{silent.getsockname()[1]}&scheme=http"
        job = tiny_job(tmp_path, [f"s3://key:secret@pile/train/*.jsonl?{query}"])
        silent.setblocking(False)
        held: list[socket.socket] = []

        def is_asked() -> bool:
            try:
                held.append(silent.accept()[0])
            except BlockingIOError:
                return False
            return True

        with Command("prepare", job, environment=ALONE) as command:
            ends(command, is_asked, "the request")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_while_documents_stream(tmp_path: Path, sent: signal.Signals) -> None:
    texts = documents(40_000)
    corpus = [write_corpus(tmp_path / f"corpus/{number}.jsonl", texts) for number in range(30)]
    data = {"tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json")), "rows_per_shard": 256}
    with Command("prepare", tiny_job(tmp_path, corpus, data=data), environment=ALONE) as command:
        ends(command, lambda: bool(list(tmp_path.glob(f"runs/data/*/{SHARDS}"))), "a shard", sent=sent)
