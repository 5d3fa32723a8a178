"""Folders of token shards, made without Ray by the writer that preparation uses."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tokendrop.config.data import DataConfig
from tokendrop.data.prepare.writer import ShardWriter
from tokendrop.data.shards.format import FORMAT, MANIFEST, SPLITS, TOKENIZER, Header, Split
from tokendrop.data.shards.manifest import Manifest


@dataclass(frozen=True)
class Document:
    """A tokenized record of a corpus, or a rejected one."""

    tokens: Sequence[int]
    split: Split = "train"
    subset: str = ""
    reason: str = ""


Files = Sequence[tuple[str, Sequence[Document]]]
"""The files of a corpus: the source of each, and its records."""


def blocks(files: Files, writer: ShardWriter, *, block: int = 7) -> list[pa.Table]:
    """What preparation would hand to a writer: the files that it wants, from the records that it wants, in blocks."""
    found = []
    for number, after in writer.todo():
        left = list(enumerate(files[number][1], start=1))[after:]
        found += [table(number, left[first : first + block]) for first in range(0, len(left), block)]
    return found


def table(file: int, records: Sequence[tuple[int, Document]]) -> pa.Table:
    return pa.table(
        {
            "tokens": pa.array([list(one.tokens) for _, one in records], pa.list_(pa.uint16())),
            "sentences": pa.array([[]] * len(records), pa.list_(pa.int64())),
            "split": pa.array([SPLITS.index(one.split) for _, one in records], pa.int8()),
            "bytes": pa.array([3 * len(one.tokens) for _, one in records], pa.int64()),
            "subset": pa.array([one.subset for _, one in records], pa.string()),
            "reason": pa.array([one.reason for _, one in records], pa.string()),
            "file": pa.array([file] * len(records), pa.int32()),
            "record": pa.array([number for number, _ in records], pa.int64()),
        }
    )


def data_config(**changes: object) -> DataConfig:
    given = {"corpus": ("unused",), "test_share": 0.1, "rows_per_shard": 16, "max_rejected": 1.0, **changes}
    return DataConfig(**given)  # pyright: ignore[reportArgumentType]


def open_writer(
    folder: Path,
    files: Files,
    *,
    sequence_length: int = 4,
    tokenizer: str = "{}",
    vocab_size: int = 2**16,
    splits: Sequence[str] | None = None,
    **data: object,
) -> ShardWriter:
    """A writer that goes on with a folder, or begins it; `splits` are those of whole files."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source for source, _ in files]
    if not (folder / MANIFEST).exists():
        (folder / TOKENIZER).write_text(tokenizer)
        Header(
            format=FORMAT,
            kind="text",
            sequence_length=sequence_length,
            row_length=sequence_length + 1,
            vocab_size=vocab_size,
            tokenizer_sha256=hashlib.sha256(tokenizer.encode()).hexdigest(),
            sources=tuple(dict.fromkeys(sources)),
            files=tuple(f"file-{number}" for number in range(len(files))),
        ).write(folder)
    return ShardWriter(folder, data_config(**data), file_sources=sources, file_splits=splits)


def write_folder(folder: Path, files: Files, *, block: int = 7, **given: object) -> Manifest:
    """All of a corpus in one go."""
    writer = open_writer(folder, files, **given)  # pyright: ignore[reportArgumentType]
    for one in blocks(files, writer, block=block):
        writer.add(one)
    return writer.finish()


def numbered_rows(count: int, row_length: int = 5) -> Files:
    """A corpus whose training row n is row_length times the number n, and one validation row."""
    documents = [Document([number] * row_length) for number in range(count)]
    return [("corpus", [*documents, Document([0] * row_length, split="validation")])]


def bytes_of(folder: Path) -> dict[str, str]:
    """All that a folder holds, by hashes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != ".lock")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def all_tokens(folder: Path, manifest: Manifest, source: str, split: Split) -> list[int]:
    """The tokens of a stream, row by row, as pyarrow reads them."""
    found: list[int] = []
    for shard in manifest.of(source, split):
        with pa.OSFile(str(folder / shard.file)) as file:
            column = pa.ipc.open_file(file).read_all().column("tokens")
        found += np.array(column.to_pylist()).ravel().tolist()
    return found
