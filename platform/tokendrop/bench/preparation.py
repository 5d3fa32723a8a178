"""Preparing token shards beside its tokenizer alone, and the memory that it takes. Each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job, load_job
from tokendrop.data.corpus.records import RecordForm, read_records
from tokendrop.data.prepare.encoder import as_tiktoken
from tokendrop.data.prepare.pipeline import find_corpus, prepare
from tokendrop.data.shards.manifest import read_header
from tokendrop.data.tokenizer import load_tokenizer, train_tokenizer
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect

_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class RepeatedCorpus:
    """A job's documents, again and again until they fill a file; a corpus of any length is that file many times."""

    config: ExperimentConfig
    scratch: Path

    def job(self, files: int) -> Path:
        """A job file for a process that measures."""
        data = self.config.data
        path = self.scratch / f"{files}.yaml"
        path.write_text(dump_job(replace(self.config, data=replace(data, corpus=data.corpus * files))))
        return path


def repeat_corpus(job: Path, overrides: list[str], scratch: Path, *, characters: int) -> RepeatedCorpus:
    """Write a file of at least so many characters, and a tokenizer where the job names none.

    Raises:
        UserError: the job or its corpus is wrong.
    """
    config = load_job(job, [*overrides, f"data.folder={scratch}/data"])
    if config.data.sources:
        raise UserError("bench data: want data.corpus, got data.sources")
    tokenizer = config.data.tokenizer
    if not tokenizer:
        tokenizer = str(scratch / "tokenizer.json")
        train_tokenizer(_texts(config), vocab_size=config.data.tokenizer_vocab_size).save(tokenizer)
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in _texts(config)]
    file = str(scratch / "corpus.jsonl.zst")
    with pa.CompressedOutputStream(file, "zstd") as out:
        for _ in range(ceil(characters / sum(map(len, lines)))):
            out.write(b"".join(lines))
    data = replace(
        config.data, corpus=(str(scratch / "corpus.jsonl.zst"),), only=(), text_key="text", tokenizer=tokenizer
    )
    return RepeatedCorpus(replace(config, data=data), scratch)


def run(what: str, job: Path) -> float:
    """Tokens per second of `prepare`, or of its `tokenizer` alone."""
    return json.loads(subprocess.run(_command(what, job), check=True, stdout=subprocess.PIPE).stdout)["tokens_per_s"]


def peak_memory(job: Path) -> int:
    """Bytes that preparation holds at most: the driver, its Ray and all workers, shared pages counted once.

    Raises:
        CalledProcessError: it failed.
    """
    with psutil.Popen(_command("prepare", job), stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _memory(process))
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return peak


def _command(what: str, job: Path) -> list[str]:
    return [sys.executable, "-m", "tokendrop.bench.preparation", what, str(job)]


def _memory(root: psutil.Popen) -> int:
    """Bytes of a process and everything below it; a page that several of them share counts for each in part."""
    found = 0
    for one in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            found += one.memory_full_info().pss
    return found


def _texts(config: ExperimentConfig) -> Iterator[str]:
    data = config.data
    form = RecordForm(
        text_key=data.text_key,
        subset_key=data.subset_key,
        only=frozenset(data.only),
        max_document_bytes=data.max_document_bytes,
    )
    for file in find_corpus(config).files:
        yield from (record.text for record in read_records(file, form) if not record.reason)


def _prepare(config: ExperimentConfig) -> float:
    connect()
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-", dir=Path(config.data.folder).parent) as folder:
        config = replace(config, data=replace(config.data, folder=folder))
        started = time.perf_counter()
        shards = prepare(config)
        seconds = time.perf_counter() - started
        return read_header(shards).tokens / seconds


def _tokenize(config: ExperimentConfig) -> float:
    """The batch encoding of the library that preparation uses, on as many threads as there are cores."""
    assert config.data.tokenizer
    tokenizer = load_tokenizer(config.data.tokenizer)
    file, *repeats = config.data.corpus
    texts = list(_texts(replace(config, data=replace(config.data, corpus=(file,)))))
    fast, threads = as_tiktoken(tokenizer), len(os.sched_getaffinity(0))
    started, tokens = time.perf_counter(), 0
    for _ in (file, *repeats):
        if fast is not None:
            tokens += sum(map(len, fast.encode_ordinary_batch(texts, num_threads=threads)))
        else:
            tokens += sum(map(len, tokenizer.encode_batch_fast(texts, add_special_tokens=False)))
    return tokens / (time.perf_counter() - started)


def main(what: str, job: str) -> None:
    """Prepare or tokenize a corpus in a process of its own, and print the speed."""
    measure: Any = {"prepare": _prepare, "tokenizer": _tokenize}[what]
    print(json.dumps({"tokens_per_s": measure(load_job(job))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
