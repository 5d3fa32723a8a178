"""Images with their labels, in the folders, tables and WebDataset archives of a corpus."""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow.fs as pafs

from tokendrop.data.corpus.byte_streams import DamageError, SourceBytes
from tokendrop.data.corpus.sources import SourceFile, check_unchanged, list_files, open_store, reaching
from tokendrop.data.corpus.table_reader import read_rows
from tokendrop.errors import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
ARCHIVES = (".parquet", ".arrow", ".tar")

_ARCHIVE_BLOCK, _ARCHIVE_END = 512, 1024  # bytes; a .tar ends with so many zeros, and may with more
_MOST_ARCHIVE_END = 2**20
_PART = "part "
_MOST_PARTS, _IMAGES_OF_PART = 64, 20_000


class ImageRecord(NamedTuple):
    """One image, or what is in its place."""

    number: int
    """Row of a table, place in a folder or an archive; counted from 1."""
    content: bytes
    """Encoded; empty where the image is rejected."""
    label: str
    reason: str = ""
    """Why it is rejected."""


def list_images(corpus: Sequence[str], *, cache: Path, key: str) -> list[SourceFile]:
    """The files of a corpus of images. A folder of images becomes some files of many records each.

    Which of them an image is in, and where, goes by a hash of its path, so that classes are mixed throughout.

    Args:
        cache: as of `list_files`; `key` alike.
    Raises:
        UserError: an entry matches nothing that can be read, or has both images and tables.
    """
    found: list[SourceFile] = []
    for entry in corpus:
        with reaching(f"{key}: can't open {entry}"):
            folders = _parts(entry)
        if folders and _has_tables(entry):
            raise UserError(
                f"{key}: {entry} has both images and tables or archives; want folders of the one or the other"
            )
        found += folders or list_files([entry], cache=cache, key=key, suffixes=ARCHIVES)
    return found


def classes_of(files: Sequence[SourceFile]) -> set[str]:
    """The names of the folders that images lie in; empty for tables and archives."""
    folders = {file.path: file for file in files if _is_part(file)}
    return {_class_of(one.path) for file in folders.values() for one in _images_below(file.store, file.path)}


def _parts(entry: str) -> list[SourceFile]:
    """A folder with images as files of many records each; empty for anything else."""
    store, path, name_of = open_store(entry)
    if store.get_file_info(path).type != pafs.FileType.Directory:
        return []
    images = _images_below(store, path)
    count = min(_MOST_PARTS, -(-len(images) // _IMAGES_OF_PART))
    return [
        SourceFile(
            name=f"{name_of(path)}/ {_PART}{number + 1} of {count}",
            store=store,
            path=path,
            size=sum(one.size or 0 for one in part),
            modified=_digest(part, path),
        )
        for number, part in enumerate(_divided(images, path, count))
        if part
    ]


def _is_part(file: SourceFile) -> bool:
    return f"/ {_PART}" in file.name


def _divided(images: Sequence[pafs.FileInfo], root: str, count: int) -> list[list[pafs.FileInfo]]:
    """The images of each of several parts, in their order."""
    hashed = [hashlib.blake2b(_below(one.path, root).encode(), digest_size=8).digest() for one in images]
    parts = [list[pafs.FileInfo]() for _ in range(count)]
    for digest, place in sorted(zip(hashed, range(len(images)), strict=True)):
        parts[int.from_bytes(digest, "big") % count].append(images[place])
    return parts


def _images_below(store: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
    """The images in a folder and in those below it; links to other folders are not followed, nor hidden ones.

    Raises:
        OSError: a folder or an image can't be looked at; it would be missed without a word.
    """
    if isinstance(store, pafs.LocalFileSystem):
        return _local_images(store, path)
    return [
        one
        for one in store.get_file_info(pafs.FileSelector(path, recursive=True))
        if one.type == pafs.FileType.File
        and _is_image(one.path)
        and not any(part.startswith(".") for part in _below(one.path, path).split("/"))
    ]


def _local_images(store: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
    def fail(error: OSError) -> None:
        raise error

    paths: list[str] = []
    for here, folders, names in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(here, name) for name in names if _is_image(name)]
    found = store.get_file_info(paths)
    for one in found:
        if one.type == pafs.FileType.NotFound:
            raise OSError(f"{one.path} is no file that can be read")
    return [one for one in found if one.type == pafs.FileType.File]


def _has_tables(entry: str) -> bool:
    store, path, _ = open_store(entry)
    found = store.get_file_info(pafs.FileSelector(path))
    return any(one.type == pafs.FileType.File and one.path.endswith(ARCHIVES) for one in found)


def _below(path: str, root: str) -> str:
    return path.removeprefix(root.rstrip("/") + "/")


def _class_of(path: str) -> str:
    """The class of an image, by its folder."""
    return PurePosixPath(path).parent.name


def read_images(file: SourceFile, columns: Sequence[str], after: int) -> Iterator[ImageRecord]:
    """Images numbered over `after`, in order, in bounded memory.

    Args:
        columns: of the image and of the label.
    Raises:
        UserError: the file is out of reach, or not the one that was listed, or has no such columns.
    """
    if _is_part(file):
        yield from _of_folder(file, after)
        return
    check_unchanged(file)
    try:
        if file.name.endswith(".tar"):
            yield from _of_archive(file, columns, after)
        else:
            for number, (image, label), _ in read_rows(file, columns, "", after):
                yield _of_values(number, image, label, columns)
    except DamageError as error:
        if error.number > after:
            yield ImageRecord(error.number, b"", "", str(error))
    check_unchanged(file)


def _of_values(number: int, image: Any, label: Any, columns: Sequence[str]) -> ImageRecord:
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes) or not content:
        return ImageRecord(number, b"", "", f"want the bytes of an image in {columns[0]!r}")
    if label is None or isinstance(label, bytes | dict | list | float):
        return ImageRecord(number, b"", "", f"want a label in {columns[1]!r}, got {label!r:.40}")
    return ImageRecord(number, content, str(label))


def _of_folder(file: SourceFile, after: int) -> Iterator[ImageRecord]:
    number, count = (int(word) for word in file.name.rpartition(_PART)[2].split(" of "))
    with reaching(f"can't read {file.name}"):
        images = _divided(_images_below(file.store, file.path), file.path, count)[number - 1]
    if _digest(images, file.path) != file.modified:
        raise UserError(f"{file.name}: changed while it was read; want files that stay as they are during preparation")
    for place, image in enumerate(images[after:], start=after + 1):
        with reaching(f"can't read {image.path}"), file.store.open_input_file(image.path) as stream:
            content = stream.read()
        reason = "" if content else f"{image.base_name}: it is empty"
        yield ImageRecord(place, content, _class_of(image.path), reason)


def _of_archive(file: SourceFile, columns: Sequence[str], after: int) -> Iterator[ImageRecord]:
    """Neighbouring files of a .tar whose names are the same up to the first dot are one sample (WebDataset)."""
    number, name, parts, end = 0, None, dict[str, bytes](), 0
    with SourceBytes(file) as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r|") as archive:
                for member in archive:
                    end = member.offset_data + -(-member.size // _ARCHIVE_BLOCK) * _ARCHIVE_BLOCK
                    if not member.isfile() or PurePosixPath(member.name).name.startswith("."):
                        continue
                    stem, _, ending = member.name.rpartition("/")[2].partition(".")
                    here = (str(PurePosixPath(member.name).parent), stem)
                    if here != name:
                        if name is not None and number > after:
                            yield _of_parts(number, parts, columns)
                        number, name, parts = number + 1, here, {}
                    content = archive.extractfile(member)
                    parts[ending.lower()] = content.read() if content else b""
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise DamageError(number + 1, error) from None
    if not _ends_at(file, end):  # of which tarfile says nothing; the last sample may lack a file
        raise DamageError(max(1, number), ValueError("its end is missing, or what follows here is no file of it"))
    if name is not None and number > after:
        yield _of_parts(number, parts, columns)


def _ends_at(file: SourceFile, end: int) -> bool:
    """Whether nothing but the zeros that end an archive follow after its last file."""
    if not _ARCHIVE_END <= file.size - end <= _MOST_ARCHIVE_END:
        return False
    with SourceBytes(file, seekable=True) as raw:
        raw.seek(end)
        return not raw.read().rstrip(b"\0")


def _of_parts(number: int, parts: dict[str, bytes], columns: Sequence[str]) -> ImageRecord:
    endings = [columns[0], *(ending for ending in parts if f".{ending}" in IMAGES)]
    content = next((parts[ending] for ending in endings if ending in parts), b"")
    label = parts.get(columns[1], parts.get("cls", b"")).decode(errors="replace").strip()
    if not content or not label:
        missing = "an image" if not content else f"a label (.{columns[1]} or .cls)"
        return ImageRecord(number, b"", "", f"want {missing} beside {', '.join(parts)[:80]}")
    return ImageRecord(number, content, label)


def _is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES) and not PurePosixPath(path).name.startswith(".")


def _digest(images: Sequence[pafs.FileInfo], root: str) -> str:
    """Of the places, sizes and times of a folder's images; their labels are in their places."""
    lines = sorted(f"{_below(one.path, root)} {one.size} {one.mtime_ns}" for one in images)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
