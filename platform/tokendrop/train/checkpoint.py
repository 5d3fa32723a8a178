"""What is saved, and when it counts: one folder a step, committed by a rename."""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tokendrop.train.committed import META, committed, read_meta, step_name
from tokendrop.train.engine import Engine


class Checkpoints:
    """The checkpoints of one run, written in the background by torch.distributed.checkpoint.

    Only what does not depend on the world size is saved: weights, optimizer state and the step. Schedules, data
    order and drops are functions of the step. A folder without its final name was never committed.
    """

    def __init__(self, folder: Path, *, keep: int, meta: Mapping[str, Any]) -> None:
        """
        Args:
            folder: on storage that all workers share.
            keep: committed checkpoints that stay; older ones are removed.
            meta: what the checkpoint says of its run, JSON; kept beside the weights.
        """
        self.folder, self.keep, self.meta = folder, keep, meta
        self._pending: Future[None] | None = None
        # Background saves run collectives of their own: on the training group they would meet gradients half-way.
        # One worker has nobody to meet, and a group costs it threads that poll: an eighth of the speed on two cores.
        shared = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = dist.new_group(backend="gloo") if shared else None
        self._is_first = self._group is None or dist.get_rank() == 0

    def save(self, engine: Engine, step: int) -> None:
        """Start saving `step`; training may go on at once. Waits for the save before it."""
        self.wait()
        final, unfinished = self.folder / step_name(step), self.folder / f"{step_name(step)}.partial"
        if self._is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            (unfinished / META).write_text(json.dumps({**self.meta, "step": step}, indent=1))
        if self._group is not None:
            dist.barrier(self._group)
        future = dcp.async_save(
            engine.state(), checkpoint_id=unfinished, process_group=self._group, no_dist=self._group is None
        )
        assert isinstance(future, Future)
        self._pending = Future()
        future.add_done_callback(partial(self._commit, self._pending, unfinished, final))

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            BaseException: what kept it from being written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        if self._group is not None:
            dist.barrier(self._group)

    def _commit(self, done: Future[None], unfinished: Path, final: Path, written: Future[Any]) -> None:
        """As soon as all workers have written their part, which rank 0's own end says."""
        try:
            written.result()
            if self._is_first:
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
                for old in committed(self.folder)[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)  # one that somebody reads just now goes next time
            done.set_result(None)
        except BaseException as error:  # for the thread that waits
            done.set_exception(error)

    def newest(self) -> Path | None:
        """The newest committed checkpoint, by rank 0's view of the folder: storage may show others an older one."""
        names = [path.name for path in committed(self.folder)[-1:]]
        if self._group is not None:
            shared = [names]
            dist.broadcast_object_list(shared, src=0, group=self._group)
            (names,) = shared
        return self.folder / names[0] if names else None

    def load(self, engine: Engine, checkpoint: Path) -> int:
        """Put a checkpoint into the engine, whatever strategy and world size wrote it; the step to go on from."""
        engine.load(checkpoint)
        return read_meta(checkpoint)["step"]


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Put a checkpoint's weights into a plain model, without its optimizer."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    with torch.no_grad():
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
