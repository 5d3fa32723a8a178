"""Corpora: which files they are, and the documents in them."""

import glob
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from tokendrop.data.python_corpus import write_python_corpus
from tokendrop.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")

# A text file has no documents of its own: it is cut at the first blank line after this many characters.
_TEXT_DOCUMENT = 16_384


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file of a corpus; a URI or an absolute path."""

    uri: str
    size: int
    modified: str


def list_files(corpus: tuple[str, ...], *, cache: Path) -> list[SourceFile]:
    """The files of a corpus, entry by entry as given and by name within an entry.

    Args:
        cache: where the built-in corpus `python` is written.
    Raises:
        UserError: an entry matches nothing that can be read.
    """
    files: list[SourceFile] = []
    for entry in corpus:
        if entry == "python":
            entry = str(write_python_corpus(cache))
        files += sorted(_remote_files(entry) if "://" in entry else _local_files(entry))
    return files


def read_documents(file: SourceFile, text_key: str) -> Iterator[str]:
    """The documents of a file, in order, in bounded memory.

    Raises:
        UserError: the file or a line of it can't be read; the message says where and why.
    """
    try:
        if file.uri.endswith(".parquet"):
            yield from _parquet(file, text_key)
        elif file.uri.endswith(".txt"):
            yield from _text(file)
        else:
            yield from _json_lines(file, text_key)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file.uri}: can't read this file, it is damaged or cut short ({reason})") from None


def _local_files(entry: str) -> list[SourceFile]:
    path = os.path.abspath(os.path.expanduser(entry))
    if os.path.isdir(path):
        found = [str(p) for p in Path(path).rglob("*") if p.name.endswith(SUFFIXES)]
    else:
        found = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
    if not found:
        raise UserError(f"data.corpus: no such file, folder or glob: {entry} (wanted {', '.join(SUFFIXES)})")
    for name in found:
        _check_suffix(name)
    return [SourceFile(name, os.stat(name).st_size, str(os.stat(name).st_mtime_ns)) for name in found]


def _remote_files(entry: str) -> list[SourceFile]:
    scheme = entry.split("://")[0]
    try:
        filesystem, path = pafs.FileSystem.from_uri(entry)
        infos = filesystem.get_file_info([path])
        if infos[0].type == pafs.FileType.Directory:
            infos = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            infos = [info for info in infos if info.path.endswith(SUFFIXES)]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.corpus: can't open {entry} ({' '.join(str(error).split())})") from None
    infos = [info for info in infos if info.type == pafs.FileType.File]
    if not infos:
        raise UserError(f"data.corpus: no such file or folder: {entry} (wanted {', '.join(SUFFIXES)})")
    for info in infos:
        _check_suffix(info.path)
    query = f"?{entry.split('?')[1]}" if "?" in entry else ""
    return [
        SourceFile(f"{scheme}://{info.path}{query}", info.size or 0, str(info.mtime_ns)) for info in infos
    ]


def _check_suffix(name: str) -> None:
    if not name.endswith(SUFFIXES):
        raise UserError(f"data.corpus: can't read {name}: want {', '.join(SUFFIXES)}")


def _open(file: SourceFile) -> Any:
    """The file's bytes, decompressed."""
    if "://" in file.uri:
        filesystem, path = pafs.FileSystem.from_uri(file.uri)
    else:
        filesystem, path = pafs.LocalFileSystem(), file.uri
    if path.endswith(".parquet"):
        return filesystem.open_input_file(path)
    return filesystem.open_input_stream(path, compression="detect")


def _json_lines(file: SourceFile, text_key: str) -> Iterator[str]:
    with _open(file) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 2**20), start=1):
            if line.isspace():
                continue
            place = f"{file.uri}:{number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not valid UTF-8 (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
            text = record.get(text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(f"{place}: want a JSON object with text in '{text_key}' (data.text_key)")
            yield text


def _text(file: SourceFile) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    with _open(file) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 2**20), start=1):
            try:
                lines.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file.uri}:{number}: not valid UTF-8 (byte {error.start} of the line)"
                ) from None
            length += len(lines[-1])
            if length >= _TEXT_DOCUMENT and line.isspace():
                yield "".join(lines)
                lines, length = [], 0
    yield "".join(lines)


def _parquet(file: SourceFile, text_key: str) -> Iterator[str]:
    with _open(file) as stream:
        table = pq.ParquetFile(stream)
        if text_key not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f"{file.uri}: no column '{text_key}' (data.text_key), it has {columns}")
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str):
                    raise UserError(
                        f"{file.uri}: row {row}: want text in '{text_key}', got {type(text).__name__}"
                    )
                yield text
