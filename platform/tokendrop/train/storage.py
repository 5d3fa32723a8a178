"""How torch.distributed.checkpoint's parts lie in a checkpoint's folder: as data, of which nothing is ever run.

torch's own index is a pickle, and so are values that are no tensors: who reads them runs what is in them. Here the
index is JSON, and tensors alone are saved, which torch reads with `weights_only`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.serialization import get_unsafe_globals_in_checkpoint

from tokendrop.errors import DamagedDataError, UserError
from tokendrop.train.committed import read_meta, write_meta
from tokendrop.train.sealed import file_sha256, write_synced

INDEX = "index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part of a tensor lies; the names are those that torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that a rank has written, beside what torch says of its tensors."""

    name: str
    sha256: str


class CheckpointWriter(StorageWriter):
    """torch's writer of files, with checksums and with an index that is JSON.

    Each rank reads what it wrote once more, from the memory where it still lies: in the background, some 1 s a GB.
    """

    def __init__(self, folder: Path, meta: Mapping[str, Any]) -> None:
        """
        Args:
            meta: as for `write_meta`.
        """
        self.folder, self.meta = folder, meta
        self._files = FileSystemWriter(folder)

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
        names = sorted({result.storage_data.relative_path for result in results})
        done: Future[Any] = Future()
        done.set_result([*results, *(Written(name=name, sha256=file_sha256(self.folder / name)) for name in names)])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index and what the checkpoint says of itself, once all ranks have written."""
        everything = [one for of_rank in results for one in of_rank]
        index = self.folder / INDEX
        results_of_torch = [one for one in everything if isinstance(one, WriteResult)]
        write_synced(index, json.dumps(_index(metadata, results_of_torch)))
        files = {one.name: one.sha256 for one in everything if isinstance(one, Written)}
        write_meta(self.folder, self.meta, {**files, INDEX: file_sha256(index)})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)


class CheckpointReader(FileSystemReader):
    """torch's reader of files, with the index of `CheckpointWriter`."""

    def __init__(self, checkpoint: Path) -> None:
        """
        Raises:
            UserError: the index does not describe tensors in the checkpoint's own files.
            DamagedDataError: it can't be read.
        """
        super().__init__(checkpoint)
        files = read_meta(checkpoint)["files"]
        if INDEX not in files:
            raise UserError(f"{checkpoint}: want a checkpoint with {INDEX}; found {', '.join(files) or 'no files'}")
        try:
            self.metadata = _metadata(json.loads((checkpoint / INDEX).read_text(encoding="utf-8")), files)
        except OSError as error:
            raise DamagedDataError(f"{checkpoint / INDEX}: can't be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"{checkpoint / INDEX}: want an index of tensors in the files of {checkpoint.name} ({reason})"
            ) from None

    def read_metadata(self) -> Metadata:  # without a rank: there is one index for all
        return self.metadata


def check_safe(checkpoint: Path) -> None:
    """Raises UserError where a part of a checkpoint is more than a tensor: reading it could run code."""
    reader = CheckpointReader(checkpoint)
    for place in reader.metadata.storage_data.values():
        path = checkpoint / place.relative_path
        try:
            with path.open("rb") as file:
                names = get_unsafe_globals_in_checkpoint(reader._slice_file(file, place))  # pyright: ignore
        except Exception as error:  # whatever a pickle that was made up brings torch to raise
            raise UserError(f"{path}: this part of a checkpoint is no tensor ({error})") from None
        if names:
            raise UserError(f"{path}: this part of a checkpoint is no tensor, reading it would run {names[0]}")


def _index(metadata: Metadata, results: list[WriteResult]) -> dict[str, Any]:
    """Tensor by name: its dtype and shape, and where its parts lie."""
    tensors: dict[str, Any] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name}: tensors alone are saved"
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        shapes = {tuple(chunk.offsets): list(chunk.sizes) for chunk in tensor.chunks}
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "parts": []}
        tensors[name]["shapes"] = shapes
    for result in results:
        tensor, place = tensors[result.index.fqn], result.storage_data
        offsets = tuple(result.index.offset or ())
        at = {"file": place.relative_path, "offset": place.offset, "length": place.length}
        tensor["parts"].append({"at": list(offsets), "shape": tensor["shapes"][offsets], **at})
    for tensor in tensors.values():
        del tensor["shapes"]
    return tensors


def _metadata(tensors: Any, files: Mapping[str, Any]) -> Metadata:
    """An index as torch wants it; raises ValueError, or what Python does, where it is none."""
    described: Any = {}
    places: dict[MetadataIndex, Place] = {}
    for name, tensor in tensors.items():
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{tensor['dtype']!r} is no dtype")
        chunks: list[ChunkStorageMetadata] = []
        for part in tensor["parts"]:
            if part["file"] not in files:
                raise ValueError(f"{part['file']!r} is not one of them")
            chunk = ChunkStorageMetadata(torch.Size(part["at"]), torch.Size(part["shape"]))
            place = Place(relative_path=part["file"], offset=int(part["offset"]), length=int(part["length"]))
            if min(place.offset, place.length, *chunk.offsets, *chunk.sizes) < 0:
                raise ValueError(f"a part of {name} has a size below 0")
            chunks.append(chunk)
            places[MetadataIndex(name, chunk.offsets)] = place
        size = torch.Size(tensor["shape"])
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(size):
            raise ValueError(f"the parts of {name} are not all of it")
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return Metadata(described, storage_data=places)
