"""Corpus -> token shards, streamed through Ray Data: read -> tokenize -> pack -> commit."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from tokenizers import Tokenizer

from tokendrop.config.data import DataConfig
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.pack import Packer
from tokendrop.data.shards import MANIFEST, TOKENIZER, Manifest, Shard, Split, read_manifest, write_shard
from tokendrop.data.sources import SourceFile, list_files, read_documents
from tokendrop.data.tokenizer import end_of_text, load_tokenizer, train_tokenizer
from tokendrop.errors import UserError

_FORMAT = 1
_BLOCK_CHARACTERS = 1_000_000

Progress = Callable[[int, int], None]


def prepare(config: ExperimentConfig, *, progress: Progress = lambda documents, tokens: None) -> Path:
    """The folder of a job's token shards, made when it is not there yet. Needs a running Ray.

    Args:
        progress: told the documents and tokens packed so far.
    Raises:
        UserError: the corpus or the tokenizer is wrong; nothing is left behind.
    """
    data, length = config.data, config.model.sequence_length
    cache = Path(data.folder).absolute()
    files = list_files(data.corpus, cache=cache)
    folder = cache / _fingerprint(data, length, files)
    if not (folder / MANIFEST).exists():
        partial = cache / f"{folder.name}.partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _prepare_into(partial, data, length, files, progress)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    check_fits(config, read_manifest(folder), folder)
    return folder


def check_fits(config: ExperimentConfig, manifest: Manifest, folder: Path) -> None:
    """Raises UserError where a job can't train on these token shards."""
    if manifest.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {manifest.vocab_size} tokens"
        )
    for split, shards in (("training", manifest.train), ("validation", manifest.validation)):
        if not any(shard.rows for shard in shards):
            raise UserError(
                f"data.corpus: {manifest.tokens} tokens in {manifest.documents} documents make no {split} row of"
                f" {manifest.sequence_length + 1} tokens; want more text, or another data.validation_share"
            )


def _fingerprint(data: DataConfig, length: int, files: list[SourceFile]) -> str:
    tokenizer = (
        Path(data.tokenizer).read_bytes() if data.tokenizer and os.path.isfile(data.tokenizer) else b""
    )
    parts = [
        _FORMAT,
        length,
        data.text_key,
        data.tokenizer_vocab_size,
        data.validation_share,
        data.rows_per_shard,
    ]
    parts += [
        hashlib.sha256(tokenizer).hexdigest(),
        *((file.uri, file.size, file.modified) for file in files),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _prepare_into(
    folder: Path, data: DataConfig, length: int, files: list[SourceFile], progress: Progress
) -> None:
    if data.tokenizer is None:
        head = (text for file in files for text in read_documents(file, data.text_key))
        tokenizer = train_tokenizer(head, vocab_size=data.tokenizer_vocab_size)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    tokenizer.save(str(folder / TOKENIZER))
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32

    packers: dict[Split, Packer] = {"train": Packer(length + 1), "validation": Packer(length + 1)}
    shards: dict[Split, list[Shard]] = {"train": [], "validation": []}
    documents = characters = tokens = 0

    def commit(split: Split, rows_NT: Any) -> None:
        path = folder / f"{split}-{len(shards[split]):05}.arrow"
        shards[split].append(write_shard(path, rows_NT.astype(dtype)))

    for block in tokenized(files, data, tokenizer):
        error = block.column("error")[0].as_py()
        if error:
            raise UserError(error)
        values = block.column("tokens").combine_chunks()
        held_out = block.column("held_out").to_numpy()
        offsets = values.offsets.to_numpy()
        flat = values.values.to_numpy()
        for number, is_held_out in enumerate(held_out):
            packers["validation" if is_held_out else "train"].add(flat[offsets[number] : offsets[number + 1]])
        for split, packer in packers.items():
            for rows_NT in packer.rows(data.rows_per_shard):
                commit(split, rows_NT)
        documents, tokens = documents + len(held_out), tokens + len(flat)
        characters += int(block.column("characters").to_numpy().sum())
        progress(documents, tokens)
    for split, packer in packers.items():
        rest = packer.rest()
        if len(rest):
            commit(split, rest)
    Manifest(
        sequence_length=length,
        vocab_size=vocab_size,
        tokenizer_sha256=hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest(),
        documents=documents,
        characters=characters,
        tokens=tokens,
        train=tuple(shards["train"]),
        validation=tuple(shards["validation"]),
    ).write(folder)


def tokenized(files: list[SourceFile], data: DataConfig, tokenizer: Tokenizer) -> Iterator[pa.Table]:
    """Blocks of tokenized documents, in the order of the corpus, whatever the number of workers.

    A file that can't be read ends the stream with a block whose `error` says why: a task that raised instead
    would be tried again, and reported with Ray's traceback.
    """
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 4 * 2**20
    context.enable_progress_bars = False
    numbers = [{"file": number} for number in range(len(files))]
    with ray.data.DataContext.current(context):
        blocks = (
            ray.data.from_items(numbers, override_num_blocks=min(len(files), 64))
            # half a core, so that Ray does not fuse both stages and one large file still fills every core
            .map_batches(
                _read, batch_size=1, num_cpus=0.5, fn_kwargs={"files": files, "text_key": data.text_key}
            )
            .map_batches(
                _tokenize,
                batch_format="pyarrow",
                fn_kwargs={"tokenizer": tokenizer.to_str(), "validation_share": data.validation_share},
            )
            .iter_batches(batch_size=None, batch_format="pyarrow")
        )
        yield from blocks


def _read(batch: dict[str, Any], *, files: list[SourceFile], text_key: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    characters = 0
    try:
        for text in read_documents(files[batch["file"][0]], text_key):
            texts.append(text)
            characters += len(text)
            if characters >= _BLOCK_CHARACTERS:
                yield {"text": np.array(texts, dtype=object), "error": [""] * len(texts)}
                texts, characters = [], 0
    except UserError as error:
        texts = [""]
        yield {"text": texts, "error": [str(error)]}
    else:
        yield {"text": texts, "error": [""] * len(texts)}


def _tokenize(block: pa.Table, *, tokenizer: str, validation_share: float) -> pa.Table:
    texts, errors = block.column("text").to_pylist(), block.column("error").to_pylist()
    bpe, end = _tokenizer(tokenizer)
    ids = [[*encoding.ids, end] for encoding in bpe.encode_batch_fast(texts, add_special_tokens=False)]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    values = np.fromiter((token for tokens in ids for token in tokens), dtype=np.uint32, count=offsets[-1])
    return pa.table(
        {
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "held_out": [_is_held_out(text, validation_share) for text in texts],
            "characters": [len(text) for text in texts],
            "error": errors,
        }
    )


def _is_held_out(text: str, share: float) -> bool:
    """By a hash of the document, so that equal documents are never on both sides."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@cache
def _tokenizer(model: str) -> tuple[Tokenizer, int]:
    tokenizer = Tokenizer.from_str(model)
    return tokenizer, end_of_text(tokenizer)
