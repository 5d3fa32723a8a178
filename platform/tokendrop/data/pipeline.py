"""Corpus -> token shards, streamed through Ray Data: read -> tokenize -> pack -> commit."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from tokenizers import Tokenizer

from tokendrop.config.data import DataConfig
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.commit import appearing
from tokendrop.data.shards import MANIFEST, Manifest, Rows, read_manifest
from tokendrop.data.sources import SourceFile, list_files, read_documents
from tokendrop.data.tokenizer import end_of_text, load_tokenizer, train_tokenizer, vocab_size
from tokendrop.data.writer import ShardWriter
from tokendrop.errors import UserError

_FORMAT = 2

# What a block of documents that goes from one stage to the next may hold; the last document may go over.
_BLOCK_CHARACTERS, _BLOCK_DOCUMENTS = 1_000_000, 4096
_BLOCK_BYTES = 4 * 2**20

Progress = Callable[[int, int], None]


def prepare(config: ExperimentConfig, *, progress: Progress = lambda documents, tokens: None) -> Path:
    """The folder of a job's token shards, made when it is not there yet. Needs a running Ray.

    Args:
        progress: told the documents and tokens packed so far.
    Raises:
        UserError: the corpus or the tokenizer is wrong; nothing is left behind.
    """
    data, shards = config.data, Path(config.data.folder).absolute()
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else None
    files = list_files(data.corpus, cache=shards)
    folder = shards / _fingerprint(config, files)
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)
        with appearing(folder) as new:
            check_fits(config, _write(new, config, files, tokenizer, progress))
    manifest = read_manifest(folder)
    check_fits(config, manifest)
    for split in ("train", "validation"):
        Rows(folder, manifest, split)
    return folder


def check_fits(config: ExperimentConfig, manifest: Manifest) -> None:
    """Raises UserError where a job can't train on these token shards."""
    _check_vocabulary(config, manifest.vocab_size)
    if not manifest.characters:
        raise UserError(f"data.corpus: it holds no text ({manifest.documents} documents)")
    remedies = {"train": "less", "validation": "more"}
    for split, shards in (("train", manifest.train), ("validation", manifest.validation)):
        if not shards:
            raise UserError(
                f"data.corpus: {manifest.tokens} tokens in {manifest.documents} documents make no {split} row"
                f" of {manifest.sequence_length + 1} tokens; want more text, or a data.validation_share"
                f" {remedies[split]} than {config.data.validation_share}"
            )


def _check_vocabulary(config: ExperimentConfig, size: int) -> None:
    if size > config.model.vocab_size:
        raise UserError(f"model.vocab_size: want at least the tokenizer's {size} tokens, got {config.model.vocab_size}")


def _fingerprint(config: ExperimentConfig, files: list[SourceFile]) -> str:
    """Names all that decides what the shards hold; a file counts as changed when its size or time is."""
    data = config.data
    parts = [
        _FORMAT,
        config.model.sequence_length,
        data.text_key,
        data.validation_share,
        data.rows_per_shard,
        hashlib.sha256(Path(data.tokenizer).read_bytes()).hexdigest() if data.tokenizer else data.tokenizer_vocab_size,
        *((file.name, file.size, file.modified) for file in files),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _write(
    folder: Path,
    config: ExperimentConfig,
    files: list[SourceFile],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Manifest:
    data = config.data
    if tokenizer is None:
        documents = (text for file in files for text in read_documents(file, data.text_key))
        tokenizer = train_tokenizer(documents, vocab_size=data.tokenizer_vocab_size)
    _check_vocabulary(config, vocab_size(tokenizer))
    writer = ShardWriter(
        folder,
        tokenizer=tokenizer,
        sequence_length=config.model.sequence_length,
        rows_per_shard=data.rows_per_shard,
    )
    for block in tokenized(files, data, tokenizer):
        writer.add(block)
        progress(writer.documents, writer.tokens)
    return writer.finish()


def tokenized(files: list[SourceFile], data: DataConfig, tokenizer: Tokenizer) -> Iterator[pa.Table]:
    """Blocks of tokenized documents, in the order of the corpus, whatever the number of workers.

    Raises:
        UserError: a file can't be read. It travels to here as a line with an `error`: a task that raised it
            instead would be tried again, and reported with Ray's traceback.
    """
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = False
    _quiet()
    read = partial(_read, files=files, text_key=data.text_key, block=(_BLOCK_CHARACTERS, _BLOCK_DOCUMENTS))
    tokenize = partial(_tokenize, tokenizer=tokenizer.to_str(), validation_share=data.validation_share)
    with ray.data.DataContext.current(context):
        blocks: Iterable[Any] = (
            ray.data.from_items([*range(len(files))], override_num_blocks=min(len(files), 64))
            # half a core, so that Ray does not fuse both stages and one large file still fills every core
            .map_batches(read, batch_size=1, num_cpus=0.5)
            .map_batches(tokenize, batch_format="pyarrow")
            .iter_batches(batch_size=None, batch_format="pyarrow")
        )
    for block in blocks:
        for error in filter(None, block.column("error").to_pylist()):
            raise UserError(error)
        if block.num_rows:
            yield block


def _quiet() -> None:
    """Ray Data tells of every execution on the console; importing it has set that up anew."""
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.ERROR)


def _read(batch: Any, *, files: list[SourceFile], text_key: str, block: tuple[int, int]) -> Iterator[pa.Table]:
    longest, most = block
    texts: list[str] = []
    characters = 0
    error = ""
    try:
        for text in read_documents(files[batch["item"][0]], text_key):
            texts.append(text)
            characters += len(text)
            if characters >= longest or len(texts) >= most:
                yield _documents(texts)
                texts, characters = [], 0
    except UserError as wrong:
        error = str(wrong)
    yield _documents(texts, error)


def _documents(texts: list[str], error: str = "") -> pa.Table:
    """Documents for the next stage; an error takes a line of its own."""
    lines = [*texts, ""] if error else texts
    errors = [None] * len(texts) + ([error] if error else [])
    return pa.table({"text": pa.array(lines, pa.large_string()), "error": pa.array(errors, pa.string())})


def _tokenize(block: pa.Table, *, tokenizer: str, validation_share: float) -> pa.Table:
    bpe, end = _tokenizer(tokenizer)
    texts, errors = block.column("text").to_pylist(), block.column("error").to_pylist()
    try:
        ids = [[*encoding.ids, end] for encoding in bpe.encode_batch_fast(texts, add_special_tokens=False)]
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        ids, errors = (
            [[end]] * len(texts),
            [f"data.tokenizer: it can't take this corpus ({reason})"] * len(texts),
        )
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    values = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=offsets[-1])
    return pa.table(
        {
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "held_out": pa.array([_is_held_out(text, validation_share) for text in texts], pa.bool_()),
            "characters": pa.array([len(text) for text in texts], pa.int64()),
            "error": pa.array(errors, pa.string()),
        }
    )


def _is_held_out(text: str, share: float) -> bool:
    """By a hash of the document, so that equal documents are never on both sides."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@cache
def _tokenizer(model: str) -> tuple[Tokenizer, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has booked one core; Ray fills the others
    tokenizer = Tokenizer.from_str(model)
    return tokenizer, end_of_text(tokenizer)
