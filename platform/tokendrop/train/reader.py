"""How workers read a checkpoint together: each part from storage once, by one of those who want it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, ReadItem, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.futures import Future

from tokendrop.errors import DamagedDataError, UserError, first_line
from tokendrop.train.slices import Slices
from tokendrop.train.storage import CheckpointIndex, read_index, read_part

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a part of a tensor: where it begins, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A part that a rank reads or gets, or both."""

    index: MetadataIndex
    reader: int
    """The rank that reads it."""
    to_all: bool
    """Every rank wants all of it."""
    pieces: tuple[tuple[int, Piece], ...] = ()
    """What the other ranks want of it, in the order in which they take it; known to the reader alone."""


class CheckpointReader(StorageReader):
    """Reads tensors that were written by `CheckpointWriter`, by all ranks of a group or by one process alone.

    Storage gives each byte once, however many ranks want it: the part that holds it is read by one of them, the one
    that has read least so far, compared with its checksum, and sent on. So each rank reads about its share, and one
    part ahead of what is sent.
    """

    def __init__(self, checkpoint: Path, group: Any = None) -> None:
        """
        Args:
            group: a gloo group of all ranks; None where one process reads by itself.
        Raises:
            UserError, DamagedDataError: as `read_index` does on rank 0, which reads the index for all.
        """
        self.checkpoint, self.group = checkpoint, group
        self.rank, world_size = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
        self._bytes_read = [0] * world_size  # as planned by rank 0, over all loads
        self._index: CheckpointIndex = from_rank_0(lambda: read_index(checkpoint), group)
        self.meta, self.metadata = self._index.meta, self._index.metadata

    @property
    def checkpoint_id(self) -> Path:
        return self.checkpoint

    def reset(self, checkpoint_id: Any = None) -> None:
        """What is read never changes."""

    def read_metadata(self) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells each rank, on rank 0, which parts it reads and gets: all ranks in the same order."""
        wanted: dict[MetadataIndex, dict[int, list[Piece]]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                wanted.setdefault(item.storage_index, {}).setdefault(rank, []).append(_piece(item))
        deliveries: list[list[Delivery]] = [[] for _ in plans]
        for index, by_rank in sorted(wanted.items(), key=lambda one: len(one[1])):  # first those that leave no choice
            reader = min(by_rank, key=self._bytes_read.__getitem__)
            self._bytes_read[reader] += self._index.place(index).length
            shape = self._index.shape(index)
            whole = (0,) * len(shape), shape
            to_all = len(plans) > 1 and all(by_rank.get(rank) == [whole] for rank in range(len(plans)))
            got = Delivery(index=index, reader=reader, to_all=to_all)
            others = () if to_all else tuple((r, piece) for r in by_rank if r != reader for piece in by_rank[r])
            for rank in by_rank:
                deliveries[rank].append(replace(got, pieces=others) if rank == reader else got)
        return [replace(plan, storage_data=some) for plan, some in zip(plans, deliveries, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises, once all ranks have what they wanted of this one, the first thing that kept it from reading."""
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        deliveries: list[Delivery] = plan.storage_data
        failures: list[Exception] = []
        with ThreadPoolExecutor(1) as disk:
            mine = self._read_ahead(disk, [one for one in deliveries if one.reader == self.rank])
            for delivery in deliveries:
                part = self._part(next(mine), delivery, failures) if delivery.reader == self.rank else None
                for item, tensor in zip(items[delivery.index], self._exchange(delivery, part, items), strict=True):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        if failures:
            raise failures[0]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_ahead(self, disk: ThreadPoolExecutor, deliveries: Sequence[Delivery]) -> Iterator[Pending[Tensor]]:
        """Each part as it is being read: the next one begins when one is taken."""
        waiting: list[Pending[Tensor]] = []
        for delivery in deliveries:
            waiting.append(disk.submit(self._read, delivery.index))
            if len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting

    def _read(self, index: MetadataIndex) -> Tensor:
        content = read_part(self.checkpoint, self._index.place(index))
        tensor = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        want = self._empty(index)
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (want.shape, want.dtype):
            raise ValueError(f"a part of {index.fqn} is not the tensor of the index")
        return tensor

    def _part(self, read: Pending[Tensor], delivery: Delivery, failures: list[Exception]) -> Tensor:
        """What was read; where that failed, anything of its size, for the other ranks wait for it."""
        try:
            return read.result()
        except Exception as error:
            failures.append(error)
            return self._empty(delivery.index)

    def _exchange(
        self, delivery: Delivery, part: Tensor | None, items: dict[MetadataIndex, list[ReadItem]]
    ) -> Iterator[Tensor]:
        """What this rank wants of a part, item by item; the rank that has read it hands it out first."""
        if delivery.to_all:
            whole = self._empty(delivery.index) if part is None else part
            dist.broadcast(whole, src=delivery.reader, group=self.group)
            yield whole
            return
        if part is not None:
            for rank, piece in delivery.pieces:
                dist.send(_cut(part, piece).contiguous(), dst=rank, group=self.group)
        for item in items[delivery.index]:
            if part is None:
                tensor = torch.empty(tuple(item.lengths), dtype=self._index.dtype(delivery.index))
                dist.recv(tensor, src=delivery.reader, group=self.group)
                yield tensor
            else:
                yield _cut(part, _piece(item))

    def _empty(self, index: MetadataIndex) -> Tensor:
        return torch.empty(self._index.shape(index), dtype=self._index.dtype(index))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()


class _Planner(DefaultLoadPlanner):
    """Looks at the slices alone that this worker's tensors are in: torch would compare them with all that there are."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        near: dict[str, Any] = {}
        for name, tensor in self.metadata.state_dict_metadata.items():
            if name in self.state_dict and isinstance(tensor, TensorStorageMetadata):
                parts = tensor.chunks
                if isinstance(parts, Slices):
                    near[name] = replace(tensor, chunks=parts.of(self.state_dict[name]))
        self.metadata = replace(self.metadata, state_dict_metadata=self.metadata.state_dict_metadata | near)
        return super().create_local_plan()


def from_rank_0(ask: Callable[[], Any], group: Any) -> Any:
    """What `ask` returns or raises on rank 0, whose view of the storage counts, on all ranks of a group.

    Args:
        group: of all ranks; None for one process alone.
    """
    if group is None:
        return ask()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [ask()]
        except Exception as error:
            found = [error]
    dist.broadcast_object_list(found, src=0, group=group)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Put a checkpoint's weights into a plain model, without its optimizer; raises as `load_into` does."""
    read_weights(model, CheckpointReader(checkpoint))


def read_weights(model: nn.Module, reader: CheckpointReader) -> None:
    """As `load_weights`, by all ranks of the reader's group together."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    with torch.no_grad():
        load_into(state, reader)
    model.load_state_dict(state["model"])


def load_into(state: dict[str, Any], reader: CheckpointReader) -> None:
    """Read into a tree of tensors, in place, as much of each as this worker holds; all ranks of the reader's group do.

    Raises:
        UserError: a part of the checkpoint is no tensor, or not of such a model.
        DamagedDataError: a part is not what was written; on all ranks.
        OSError: storage can't be read just now; on all ranks.
    """
    try:
        dcp.load(
            state, storage_reader=reader, planner=_Planner(), process_group=reader.group, no_dist=reader.group is None
        )
    except CheckpointException as error:
        failures = [one for one, _ in error.failures.values()]
        for failure in failures:
            if isinstance(failure, DamagedDataError | OSError):
                raise failure from None
        reason = first_line(failures[0])
        raise UserError(f"{reader.checkpoint_id}: can't be read as a checkpoint of this model ({reason})") from None


def _piece(item: ReadItem) -> Piece:
    return tuple(item.storage_offsets), tuple(item.lengths)


def _cut(part: Tensor, piece: Piece) -> Tensor:
    for dimension, (start, length) in enumerate(zip(*piece, strict=True)):
        part = part.narrow(dimension, start, length)
    return part
