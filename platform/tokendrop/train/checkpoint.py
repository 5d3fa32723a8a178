"""What is saved, and when it counts: one folder a step, committed by a rename."""

import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from tokendrop.errors import DamagedDataError, StorageError, UserError
from tokendrop.method import TokenScores
from tokendrop.train.checkpoint_index import committed, newest_complete, remove_old, set_aside, step_name
from tokendrop.train.engines.base import Engine
from tokendrop.train.reader import CheckpointReader, from_rank_0, load_into
from tokendrop.train.storage import INDEX, CheckpointWriter


class SetAsideError(RuntimeError):
    """A checkpoint proved damaged when it was read; the one before it counts now, for whoever starts anew."""


class CheckpointStore(Protocol):
    """Where checkpoints are kept beside their folder: a run's place in an object store."""

    def cut(self, step: int) -> None:
        """Remove what is behind the step that the run goes on from; by rank 0."""
        ...

    def put(self, file: Path) -> None:
        """Write a file of a checkpoint there; by each rank, those that it has written."""
        ...

    def commit(self, checkpoint: Path) -> None:
        """Let a checkpoint whose files are there count; by rank 0."""
        ...

    def remove_old(self, keep: int) -> None:
        """Remove older checkpoints there; by rank 0."""
        ...


class Checkpoints:
    """The checkpoints of one run, written in the background by torch.distributed.checkpoint.

    Only what does not depend on the world size is saved: weights, optimizer state, the step, and the running scores of
    a method that has some. Schedules, data order and drops are functions of the step. A folder without its final name
    was never committed; of one with it, every file has its checksum in meta.json.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        meta: Mapping[str, Any],
        scores: TokenScores | None = None,
        store: CheckpointStore | None = None,
        leads: bool | None = None,
    ) -> None:
        """
        Args:
            folder: on storage that all workers share; with a store, that all workers of a machine share.
            keep: committed checkpoints that stay; older ones are removed.
            meta: what the checkpoint says of its run, JSON; kept beside the weights.
            scores: what the job's method keeps beside the weights.
            store: has each checkpoint before the folder does.
            leads: whether this worker makes the folder ready for those that share it; rank 0 does when left out.
        """
        self.folder, self.keep, self.meta, self.scores, self.store = folder, keep, meta, scores, store
        self._pending: Future[None] | None = None
        # Background saves run collectives of their own: on the training group they would meet gradients half-way.
        # One worker has nobody to meet, and a group costs it threads that poll: an eighth of the speed on two cores.
        shared = dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = dist.new_group(backend="gloo") if shared else None
        self._is_first = self.group is None or dist.get_rank() == 0
        self._leads = self._is_first if leads is None else leads
        self._pinned: AsyncStager | None = None

    def go_on(self, step: int) -> None:
        """By all ranks, before they train on from `step`: the store has nothing behind it from now on.

        Raises:
            UserError: what rank 0 was told by the store; on all ranks, which wait for it here.
        """
        if self.store is not None:
            from_rank_0(partial(self.store.cut, step), self.group)

    def save(self, engine: Engine, step: int) -> None:
        """Start saving `step`; training may go on at once. Waits for the save before it."""
        self.wait()
        final, unfinished = self.folder / step_name(step), self.folder / f"{step_name(step)}.partial"
        if self._leads:
            for left in self.folder.glob("step_*.partial"):  # of a process that died while it saved, at whatever step
                shutil.rmtree(left, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self.wait_for_all()
        method = {} if self.scores is None else {"method": self.scores.state()}
        future = dcp.async_save(
            engine.state() | method,
            storage_writer=CheckpointWriter(
                unfinished, {**self.meta, "step": step}, None if self.store is None else self.store.put
            ),
            process_group=self.group,
            no_dist=self.group is None,
            async_stager=self._stager(engine),
        )
        assert isinstance(future, Future)
        self._pending = Future()
        future.add_done_callback(partial(self._commit, self._pending, unfinished, final))

    def _stager(self, engine: Engine) -> AsyncStager | None:
        """What copies a state before training goes on: from a GPU into pinned memory, which is taken once and kept."""
        if engine.device.type != "cuda":
            return None
        if self._pinned is None:
            self._pinned = DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False))
        return self._pinned

    def wait_for_all(self) -> None:
        """Return when all workers are here, on whom a group without GPUs waits for half an hour."""
        if self.group is not None:
            dist.barrier(self.group)

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            BaseException: what kept it from being written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointException as error:  # of all ranks, around what one of them has to say
            told = (failure for failure, _ in error.failures.values() if isinstance(failure, UserError))
            raise next(told, error) from None
        self.wait_for_all()

    def _commit(self, done: Future[None], unfinished: Path, final: Path, written: Future[Any]) -> None:
        """As soon as all workers have written their part, which rank 0's own end says."""
        try:
            written.result()
            if self._is_first:
                if self.store is not None:
                    self.store.put(unfinished / INDEX)
                    self.store.commit(unfinished)
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
                remove_old(self.folder, self.keep)
                self._remove_old_in_store()
            done.set_result(None)
        except BaseException as error:  # for the thread that waits
            done.set_exception(error)

    def _remove_old_in_store(self) -> None:
        if self.store is None:
            return
        try:
            self.store.remove_old(self.keep)
        except StorageError as error:  # the new one is committed
            print(f"note     older checkpoints stay: {error}", file=sys.stderr, flush=True)

    def newest(self) -> Path | None:
        """What `newest_complete` gives on rank 0, whose view of the storage counts: it may show others an older one.

        Damaged ones that are newer get the suffix `.damaged`, for they count no more.

        Raises:
            DamagedDataError: there are checkpoints, and none is complete; on all ranks.
        """
        name = from_rank_0(self._newest, self.group)
        return None if name is None else self.folder / name

    def _newest(self) -> str | None:
        newest = newest_complete(self.folder)
        if newest is None:
            return None
        set_aside(newest)
        return newest.name

    def load(self, engine: Engine, checkpoint: Path) -> int:
        """Put a checkpoint into the engine, whatever strategy and world size wrote it; the step to go on from.

        What is read is compared with its checksums as it is read: a second reading would take as long again.

        Raises:
            SetAsideError: it is damaged, and there is one before it; the engine is of no more use.
            DamagedDataError: it is damaged, and the only one.
        """
        try:
            reader = CheckpointReader(checkpoint, self.group)
            engine.load(reader)
            if self.scores is not None:
                method = self.scores.state()
                load_into({"method": method}, reader)
                self.scores.load(method)
        except DamagedDataError as error:
            earlier = from_rank_0(partial(self._set_aside, checkpoint), self.group)
            if earlier is None:
                raise DamagedDataError(f"{error}; {self.folder} has no other checkpoint that is whole") from None
            raise SetAsideError(f"{error}; {earlier.name} counts in its place") from None
        return reader.meta["step"]

    def _set_aside(self, damaged: Path) -> Path | None:
        """The checkpoint before one that is damaged, and now out of the way; None where there is none."""
        saved = committed(self.folder)
        earlier = saved[: saved.index(damaged)]
        if earlier:
            set_aside(earlier[-1])
        return earlier[-1] if earlier else None
