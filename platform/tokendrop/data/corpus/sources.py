"""Corpora: which files they are, in whatever store they lie."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

import pyarrow.fs as pafs

from tokendrop.data.corpus.python_corpus import write_python_corpus
from tokendrop.errors import UserError
from tokendrop.secrets import HIDDEN, redact

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".arrow", ".tsv", ".txt")

# Stores of pyarrow's own; fsspec is asked for all others.
_NATIVE_SCHEMES = {"file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}

# What file systems of fsspec tell of a file that becomes another when its content does.
_VERSIONS = ("mtime", "created", "LastModified", "last_modified", "Last-Modified", "updated", "ETag", "etag", "blob_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a corpus, in a store that pyarrow can read."""

    name: str
    """An absolute path, or a URI without its credentials."""
    store: pafs.FileSystem
    path: str
    size: int
    modified: str

    @property
    def resolved(self) -> str:
        """The name of the file itself, where this one is a link to it or lies behind one."""
        return os.path.realpath(self.path) if isinstance(self.store, pafs.LocalFileSystem) else self.name


def list_files(
    corpus: Sequence[str], *, cache: Path, key: str = "data.corpus", suffixes: tuple[str, ...] = SUFFIXES
) -> list[SourceFile]:
    """The files of a corpus, entry by entry as given and by name within an entry, in every store alike.

    Args:
        cache: where the built-in corpus `python` is written.
        key: of the corpus in the job, for messages.
        suffixes: of the files to read.
    Raises:
        UserError: an entry matches nothing that can be read.
    """
    files: list[SourceFile] = []
    for entry in corpus:
        if entry == "python":
            entry = str(write_python_corpus(cache))
        with reaching(f"{key}: can't open {public_name(entry)}"):
            found = _stored_files(entry, suffixes) if "://" in entry else _local_files(entry, suffixes)
        if not found:
            wanted = ", ".join(suffixes)
            raise UserError(f"{key}: no such file, folder or glob: {public_name(entry)} (want {wanted})")
        for file in found:
            if not file.name.endswith(suffixes):
                raise UserError(f"{key}: can't read {file.name}: want {', '.join(suffixes)}")
        files += sorted(found, key=lambda file: file.path)
    return files


def check_unchanged(file: SourceFile) -> None:
    """Raises UserError where a file is no longer the one that was listed."""
    with reaching(f"can't read {file.name}"):
        if isinstance(file.store, pafs.PyFileSystem):
            file.store.handler.fs.invalidate_cache(file.path)
        info = file.store.get_file_info(file.path)
        is_there = info.type == pafs.FileType.File
        is_same = is_there and (info.size, _version(file.store, info)) == (file.size, file.modified)
    if not is_same:
        what = "changed" if is_there else "vanished"
        raise UserError(f"{file.name}: {what} while it was read; want files that stay as they are during preparation")


def _local_files(entry: str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    path = os.path.abspath(os.path.expanduser(entry))
    if os.path.isdir(path):
        found = list(_below(path, suffixes))
    elif os.path.isfile(path):
        found = [path]
    else:
        found = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        if not found and os.path.lexists(path):
            raise OSError("it is neither a file nor a folder")
    local = pafs.LocalFileSystem()
    return [_source(local, info, info.path) for info in local.get_file_info(found)]


def _below(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The files of a folder's corpus; one that can't be looked into would be missed without a word, and is an error."""

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [os.path.join(here, name) for name in names if _in_folder(name, suffixes)]
        for path in paths:
            if not os.path.isfile(path):
                raise OSError(f"{path} is no file that can be read")
        yield from paths


def _stored_files(entry: str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """Files behind a URI; `*`, `**` and `[...]` mean what they mean in a local path."""
    store, path, name_of = open_store(entry)
    if isinstance(store, pafs.LocalFileSystem):
        return _local_files(path, suffixes)
    return [_source(store, info, name_of(info.path)) for info in _find(store, path, suffixes)]


def open_store(entry: str) -> tuple[pafs.FileSystem, str, Callable[[str], str]]:
    """The store behind a path or a URI, the path in it, and what gives a path there its public name."""
    if "://" not in entry:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(entry)), str
    scheme, _, rest = entry.partition("://")
    if scheme not in _NATIVE_SCHEMES:
        store, path = pafs.FileSystem.from_uri(f"fsspec+{entry}")
        store.handler.fs.invalidate_cache()
    else:
        location, query_mark, query = rest.partition("?")
        uri = f"{scheme}://{quote(location, safe='/%:@*+,;=&$!()~')}{query_mark}{query}"
        store, path = pafs.FileSystem.from_uri(uri)
    return store, path, lambda found: public_name(found if "://" in found else f"{scheme}://{found.lstrip('/')}")


def _source(store: pafs.FileSystem, info: pafs.FileInfo, name: str) -> SourceFile:
    if info.size is None:
        raise UserError(f"{name}: its store does not tell its size; want one that does")
    return SourceFile(name=name, store=store, path=info.path, size=info.size, modified=_version(store, info))


def _version(store: pafs.FileSystem, info: pafs.FileInfo) -> str:
    if not isinstance(store, pafs.PyFileSystem):
        return str(info.mtime_ns)
    told = store.handler.fs.info(info.path)
    return " ".join(f"{key}={told[key]}" for key in _VERSIONS if told.get(key) is not None)


def _find(store: pafs.FileSystem, path: str, suffixes: tuple[str, ...]) -> list[pafs.FileInfo]:
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
        is_wanted = _in_folder("/".join(below), suffixes) if is_folder else _matches(below, pattern)
        if info.type == pafs.FileType.File and is_wanted:
            found.append(info)
    return found


def _in_folder(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a folder's corpus has this file; hidden files and folders are somebody else's."""
    return name.endswith(suffixes) and not any(part.startswith(".") for part in name.split("/"))


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


@contextmanager
def reaching(complaint: str) -> Iterator[None]:
    """Whatever a store raises, and its library may raise anything, as a UserError of one sentence."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or "fsspec"
        raise UserError(f"{complaint}: want a package for it: pip install {missing.partition('.')[0]}") from None
    except Exception as error:
        raise UserError(f"{complaint} ({public_name(' '.join(str(error).split()))})") from None


def public_name(text: str) -> str:
    """In one line, without the credentials that a URI may carry before its host or in its query."""
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    without_user = re.sub(r"://(?:[^/@\s]*:[^@\s]*@|[^/@\s]*@)", "://", redact(text).replace(f"{HIDDEN}@", ""))
    return re.sub(r"(://[^?\s]*)\?\S*", r"\1", without_user)
