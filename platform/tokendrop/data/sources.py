"""Corpora: which files they are, and the documents in them."""

import glob
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from tokendrop.data.python_corpus import write_python_corpus
from tokendrop.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")

# A text file has no documents of its own. It is cut at the first blank line after so many characters, or,
# where there is none for long, at the end of a line.
_TEXT_DOCUMENT, _LONGEST_TEXT_DOCUMENT = 16_384, 262_144

# An object store is asked for this much at a time; each request costs it some 50 ms.
_STORE_READ_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a corpus, in a store that pyarrow can read."""

    name: str
    """An absolute path, or a URI without its credentials."""
    store: pafs.FileSystem
    path: str
    size: int
    modified: str


def list_files(corpus: tuple[str, ...], *, cache: Path) -> list[SourceFile]:
    """The files of a corpus, entry by entry as given and by name within an entry, in every store alike.

    Args:
        cache: where the built-in corpus `python` is written.
    Raises:
        UserError: an entry matches nothing that can be read.
    """
    files: list[SourceFile] = []
    for entry in corpus:
        if entry == "python":
            entry = str(write_python_corpus(cache))
        found = _stored_files(entry) if "://" in entry else _local_files(entry)
        if not found:
            wanted = ", ".join(SUFFIXES)
            raise UserError(f"data.corpus: no such file, folder or glob: {_public(entry)} (want {wanted})")
        for file in found:
            if not file.path.endswith(SUFFIXES):
                raise UserError(f"data.corpus: can't read {file.name}: want {', '.join(SUFFIXES)}")
        files += sorted(found, key=lambda file: file.path)
    return files


def read_documents(file: SourceFile, text_key: str) -> Iterator[str]:
    """The documents of a file, in order, in bounded memory.

    Raises:
        UserError: the file or a line of it can't be read; the message says where and why.
    """
    try:
        if file.path.endswith(".parquet"):
            yield from _parquet(file, text_key)
        elif file.path.endswith(".txt"):
            yield from _text(file)
        else:
            yield from _json_lines(file, text_key)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file.name}: can't read this file, it is damaged, cut short or out of reach ({_line(error)})"
        ) from None


def _local_files(entry: str) -> list[SourceFile]:
    path = os.path.abspath(os.path.expanduser(entry))
    if os.path.isdir(path):
        below = (p.relative_to(path).as_posix() for p in Path(path).rglob("*") if p.is_file())
        found = [os.path.join(path, name) for name in below if _in_folder(name)]
    elif os.path.isfile(path):
        found = [path]
    else:
        found = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
    local = pafs.LocalFileSystem()
    stats = [(name, os.stat(name)) for name in found]
    return [
        SourceFile(name=name, store=local, path=name, size=stat.st_size, modified=str(stat.st_mtime_ns))
        for name, stat in stats
    ]


def _stored_files(entry: str) -> list[SourceFile]:
    """Files behind a URI; `*`, `**` and `[...]` mean what they mean in a local path."""
    scheme, _, rest = entry.partition("://")
    location, query_mark, query = rest.partition("?")
    try:
        store, path = pafs.FileSystem.from_uri(
            f"{scheme}://{quote(location, safe='/%:@*+,;=&$!()~')}{query_mark}{query}"
        )
        if isinstance(store, pafs.LocalFileSystem):
            return _local_files(path)
        infos = _find(store, path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.corpus: can't open {_public(entry)} ({_public(_line(error))})") from None
    return [
        SourceFile(
            name=f"{scheme}://{info.path}",
            store=store,
            path=info.path,
            size=info.size or 0,
            modified=str(info.mtime_ns),
        )
        for info in infos
    ]


def _find(store: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
    here = store.get_file_info(path)
    if here.type == pafs.FileType.File:
        return [here]
    parts = path.strip("/").split("/")
    is_folder = here.type == pafs.FileType.Directory
    plain = parts if is_folder else list(takewhile(lambda part: not glob.has_magic(part), parts))
    pattern = ["**", "*"] if is_folder else parts[len(plain) :]
    if not pattern:
        return []
    selector = pafs.FileSelector("/".join(plain), recursive=len(pattern) > 1, allow_not_found=True)
    found: list[pafs.FileInfo] = []
    for info in store.get_file_info(selector):
        below = info.path.strip("/").split("/")[len(plain) :]
        is_wanted = _in_folder("/".join(below)) if is_folder else _matches(below, pattern)
        if info.type == pafs.FileType.File and is_wanted:
            found.append(info)
    return found


def _in_folder(name: str) -> bool:
    """Whether a folder's corpus has this file; hidden files and folders are somebody else's."""
    return name.endswith(SUFFIXES) and not any(part.startswith(".") for part in name.split("/"))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """As `glob`: `*` stays within a name and passes over hidden ones, `**` is any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        deeper = bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
        return deeper or _matches(parts, pattern[1:])
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _public(text: str) -> str:
    """Without the credentials that a URI may carry."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _open(file: SourceFile) -> Any:
    """The file's bytes, decompressed."""
    if file.path.endswith(".parquet"):
        return file.store.open_input_file(file.path)
    is_local = isinstance(file.store, pafs.LocalFileSystem)
    return file.store.open_input_stream(
        file.path, compression="detect", buffer_size=None if is_local else _STORE_READ_BYTES
    )


def _lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Numbered lines, ended by "\\n" alone: U+2028 and its like belong to the text."""
    with _open(file) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 2**20), start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{file.name}:{number}: not valid UTF-8 (byte {error.start + 1} of the line)") from None
            yield number, text


def _json_lines(file: SourceFile, text_key: str) -> Iterator[str]:
    for number, line in _lines(file):
        if not line.strip(" \t\r\n"):
            continue
        place = f"{file.name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
            raise UserError(f"{place}: can't read this JSON ({_line(error)})") from None
        text = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{place}: want a JSON object with text in '{text_key}' (data.text_key)")
        yield _checked(text, place)


def _text(file: SourceFile) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    for _, line in _lines(file):
        lines.append(line)
        length += len(line)
        if length >= _TEXT_DOCUMENT and (line.isspace() or length >= _LONGEST_TEXT_DOCUMENT):
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def _parquet(file: SourceFile, text_key: str) -> Iterator[str]:
    with _open(file) as stream:
        table = pq.ParquetFile(stream)
        if text_key not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f"{file.name}: no column '{text_key}' (data.text_key), it has {columns}")
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[text_key]):
            for value in batch.column(0):
                row += 1
                yield _parquet_text(value, f"{file.name}: row {row}", text_key)


def _parquet_text(value: pa.Scalar, place: str, text_key: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        raise UserError(f"{place}: not valid UTF-8") from None
    if not isinstance(text, str):
        found = "nothing" if text is None else type(text).__name__
        raise UserError(f"{place}: want text in '{text_key}' (data.text_key), got {found}")
    return text


def _checked(text: str, place: str) -> str:
    """JSON can spell half of a character, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise UserError(f"{place}: \\u{half:04x} is half of a surrogate pair, and no character") from None
    return text
