"""How torch.distributed.checkpoint's parts lie in a checkpoint's folder: as data, of which nothing is ever run.

torch's own index is a pickle, and so are values that are no tensors: who reads them runs what is in them. Here the
index is JSON, and tensors alone are saved, which torch reads with `weights_only`.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tokendrop.errors import DamagedDataError, UserError
from tokendrop.train.checkpoint_index import read_meta, write_meta
from tokendrop.train.sealed import NO_FILE, file_sha256, write_synced
from tokendrop.train.slices import Place, Slices, as_slices, described, rows_of_slices

INDEX = "index.json"
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that a rank has written, beside what torch says of its tensors."""

    name: str
    bytes: int
    sha256: str
    crc32s: Mapping[int, int]
    """Of each part, by its offset."""


class CheckpointWriter(StorageWriter):
    """torch's writer of files, with checksums and with an index that is JSON.

    Each rank reads what it wrote once more, from the memory where it still lies: in the background, some 1 s a GB.
    """

    def __init__(self, folder: Path, meta: Mapping[str, Any], put: Callable[[Path], None] | None = None) -> None:
        """
        Args:
            meta: as for `write_meta`.
            put: given each file that this rank has written, before the others hear of it.
        """
        self.folder, self.meta, self._put = folder, meta, put
        # without copies ahead: the state is on the host, and they would touch the first GPU from each rank
        self._files = FileSystemWriter(folder, per_thread_copy_ahead=0)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._files.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._files.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._files.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._files.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """What torch says of each tensor that this rank has written, then a `Written` for each of its files."""
        results = self._files.write_data(plan, planner).wait()
        ends: dict[str, dict[int, int]] = {}
        for place in (result.storage_data for result in results):
            ends.setdefault(place.relative_path, {})[place.offset] = place.offset + place.length
        written = [_written(self.folder / name, ends[name]) for name in sorted(ends)]
        if self._put is not None:
            for name in sorted(ends):
                self._put(self.folder / name)
        done: Future[Any] = Future()
        done.set_result([*results, *written])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index and what the checkpoint says of itself, once all ranks have written."""
        everything = [one for of_rank in results for one in of_rank]
        index = self.folder / INDEX
        results_of_torch = [one for one in everything if isinstance(one, WriteResult)]
        files = {one.name: one for one in everything if isinstance(one, Written)}
        write_synced(index, json.dumps(_index(metadata, results_of_torch, files)))
        write_meta(
            self.folder,
            self.meta,
            {**{name: file.sha256 for name, file in files.items()}, INDEX: file_sha256(index)},
            sizes={name: file.bytes for name, file in files.items()},  # other ranks may have written to other disks
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """What a checkpoint says of itself, and where its tensors lie."""

    meta: dict[str, Any]
    metadata: Metadata = field(repr=False)
    """As torch has it; places of the parts that are no slices are its `storage_data`."""

    def place(self, part: MetadataIndex) -> Place:
        """Where a part lies."""
        parts = self._tensor(part).chunks
        return parts.place(_begin(part)) if isinstance(parts, Slices) else self.metadata.storage_data[part]

    def shape(self, part: MetadataIndex) -> tuple[int, ...]:
        """Of a part."""
        parts, at = self._tensor(part).chunks, _begin(part)
        found = parts.at(at) if isinstance(parts, Slices) else next(one for one in parts if one.offsets == at)
        return tuple(found.sizes)

    def dtype(self, part: MetadataIndex) -> torch.dtype:
        """Of a part."""
        return self._tensor(part).properties.dtype

    def _tensor(self, part: MetadataIndex) -> TensorStorageMetadata:
        tensor = self.metadata.state_dict_metadata[part.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        return tensor


def read_index(checkpoint: Path) -> CheckpointIndex:
    """Read a checkpoint's meta.json and index.json, each compared with its checksum.

    The parts of tensors are compared with theirs when they are read.

    Raises:
        UserError: the index does not describe tensors in the checkpoint's own files.
        DamagedDataError: one of the two is damaged.
        OSError: storage that can't be read just now, which says nothing of the checkpoint.
    """
    meta = read_meta(checkpoint)
    files = meta["files"]
    if INDEX not in files:
        raise UserError(f"{checkpoint}: want a checkpoint with {INDEX}; found {', '.join(files) or 'no files'}")
    try:
        content = (checkpoint / INDEX).read_bytes()
        if hashlib.sha256(content).hexdigest() != files[INDEX]["sha256"]:
            raise DamagedDataError(f"{checkpoint / INDEX}: damaged; its checksum is not the one in meta.json")
        metadata = _metadata(json.loads(content.decode()), files)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        raise DamagedDataError(f"{checkpoint / INDEX}: can't be read ({error.strerror})") from None
    except DamagedDataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{checkpoint / INDEX}: want an index of tensors in the files of {checkpoint.name} ({reason})"
        ) from None
    return CheckpointIndex(meta=meta, metadata=metadata)


def read_part(checkpoint: Path, place: Place) -> bytes:
    """The bytes of a part of a tensor.

    Raises:
        DamagedDataError: they are not those that were written.
        OSError: they can't be read just now.
    """
    path = checkpoint / place.file
    with path.open("rb") as file:
        file.seek(place.offset)
        content = file.read(place.length)
    if len(content) != place.length or zlib.crc32(content) != place.crc32:
        at = f"bytes {place.offset} to {place.offset + place.length}"
        raise DamagedDataError(f"{path}: damaged; the checksum of its {at} is not the one in {INDEX}")
    return content


def _written(path: Path, ends: Mapping[int, int]) -> Written:
    """Checksums of a file and its parts, whose ends are given by their offsets; one part begins where another ends."""
    whole, crc32s = hashlib.sha256(), dict[int, int]()
    with path.open("rb") as file:
        for start in sorted(ends):
            crc32s[start] = 0
            for chunk in _chunks(file, ends[start] - start):
                whole.update(chunk)
                crc32s[start] = zlib.crc32(chunk, crc32s[start])
        assert not file.read(1), f"{path}: has bytes that are no part of a tensor"
        size = file.tell()
    return Written(name=path.name, bytes=size, sha256=whole.hexdigest(), crc32s=crc32s)


def _chunks(file: Any, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(size, _CHUNK_BYTES))):
        yield chunk
        size -= len(chunk)


def _begin(part: MetadataIndex) -> torch.Size:
    assert part.offset is not None, "every part is of a tensor"
    return part.offset


def _index(metadata: Metadata, results: Iterable[WriteResult], files: Mapping[str, Written]) -> dict[str, Any]:
    """Tensor by name: its dtype and shape, and where its slices, or its parts one by one, lie."""
    tensors: dict[str, Any] = {}
    numbers = {name: number for number, name in enumerate(sorted(files))}
    stored: dict[str, list[tuple[Sequence[int], Any]]] = {name: [] for name in metadata.state_dict_metadata}
    for result in results:
        stored[result.index.fqn].append((result.index.offset or (), result.storage_data))
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name}: tensors alone are saved"
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size)}
        places = [
            (at, one.relative_path, one.offset, one.length, files[one.relative_path].crc32s[one.offset])
            for at, one in sorted(stored[name], key=itemgetter(0))
        ]
        if (rows := rows_of_slices(tensor)) is not None:
            _, file, *columns = zip(*places, strict=True)
            tensors[name]["slices"] = described(rows, [numbers[one] for one in file], *columns)
        else:
            shapes = {tuple(part.offsets): list(part.sizes) for part in tensor.chunks}
            tensors[name]["parts"] = [
                {
                    "at": list(at),
                    "shape": shapes[tuple(at)],
                    "file": file,
                    "offset": begin,
                    "length": size,
                    "crc32": crc32,
                }
                for at, file, begin, size, crc32 in places
            ]
    return tensors


def _metadata(tensors: Any, files: Mapping[str, Any]) -> Metadata:
    """An index as torch wants it; raises ValueError, or what Python does, where it is none."""
    found: Any = {}
    places: dict[MetadataIndex, Place] = {}
    sizes = {name: files[name]["bytes"] for name in sorted(files) if name != INDEX}
    for name, tensor in tensors.items():
        dtype, size = getattr(torch, tensor["dtype"]), torch.Size(tensor["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{tensor['dtype']!r} is no dtype")
        if "slices" in tensor:
            parts: Any = as_slices(size, tensor["slices"], sizes)
        else:
            placed = [_placed(part, sizes) for part in tensor["parts"]]
            parts = [part for part, _ in placed]
            places |= {MetadataIndex(name, part.offsets): place for part, place in placed}
            if sum(prod(part.sizes) for part in parts) != prod(size):
                raise ValueError(f"the parts of {name} are not all of it")
        found[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, parts)
    return Metadata(found, storage_data=places)


def _placed(part: Any, sizes: Mapping[str, int]) -> tuple[ChunkStorageMetadata, Place]:
    if part["file"] not in sizes:
        raise ValueError(f"{part['file']!r} is not one of them")
    chunk = ChunkStorageMetadata(torch.Size(part["at"]), torch.Size(part["shape"]))
    offset, length = int(part["offset"]), int(part["length"])
    if min(offset, length, *chunk.offsets, *chunk.sizes) < 0:
        raise ValueError("a part has a size below 0")
    if offset + length > sizes[part["file"]]:
        raise ValueError("a part ends behind its file")
    return chunk, Place(file=part["file"], offset=offset, length=length, crc32=int(part["crc32"]))
