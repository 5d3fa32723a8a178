"""Workers on machines that do not see the copy of a stored run that its driver has: each machine has one of its own.

What is committed they read from the store and write there. The rest goes by an actor on the driver's machine: what the
driver and the policy ask of rank 0, and what rank 0 adds to the live record, and to the few files that change with it.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import ray.train
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.atomic import atomic_write
from tokendrop.elastic.control import RunControl
from tokendrop.launch.collectives import all_do, patient_group
from tokendrop.launch.driver_copy import CHANGING, DriverCopy
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.journal import METRICS
from tokendrop.track.run_copy import bring_for_workers, catch_up
from tokendrop.track.run_home import RunHome, home_of
from tokendrop.track.run_store import workers_place

_SEEN_WITHIN_S = 10.0  # so long shared storage may show an older state
_EVERY_S = 0.1
_ANSWER_S = 60.0  # for the driver's machine
_MOST_BYTES = 2**22  # of the live record at once


class Relay:
    """Rank 0's side: makes its folder begin with the record of the driver's copy, then exchanges what is new."""

    def __init__(self, copy: Any, run: Path) -> None:
        self.run, self._copy, self._id = run, copy, uuid4().hex
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = self._answer(copy.begin.remote(self._id))
        for name, content in self._known.items():
            atomic_write(run / name, content)
        with (run / METRICS).open("wb") as record:
            while chunk := self._answer(copy.record.remote(record.tell())):
                record.write(chunk)
            self._sent = record.tell()

    def exchange(self) -> int:
        """Return when the driver's copy has all that is in this folder now: bytes of the live record there.

        Raises:
            RuntimeError: others follow this rank 0 by now.
            ray.exceptions.RayError: the driver's machine does not answer.
        """
        with self._lock:
            while self._exchange():
                pass
            return self._sent

    def _exchange(self) -> bool:
        """Whether there may be more."""
        with (self.run / METRICS).open("rb") as record:
            record.seek(self._sent)
            lines = record.read(_MOST_BYTES)
        files = {name: (self.run / name).read_bytes() for name in CHANGING if (self.run / name).exists()}
        changed = {name: content for name, content in files.items() if content != self._known.get(name)}
        told = self._answer(self._copy.exchange.remote(self._id, self._sent, lines, changed))
        self._sent, self._known = self._sent + len(lines), files
        RunControl(self.run).tell(told)
        return len(lines) == _MOST_BYTES

    @staticmethod
    def _answer(asked: Any) -> Any:
        return ray.get(asked, timeout=_ANSWER_S)


@contextmanager
def exchanging(relay: Relay) -> Iterator[None]:
    """While the block runs, a thread exchanges again and again; once more at its end."""
    relay.exchange()
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_EVERY_S):
            with suppress(Exception):  # the next commit tells of what lasts
                relay.exchange()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            relay.exchange()


@contextmanager
def reaching_driver(spec: WorkerSpec) -> Iterator[WorkerSpec]:
    """In a driver: while the block runs, workers by this spec reach its copy of the run, where a store keeps that."""
    if spec.stored is None:
        yield spec
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(DriverCopy)
    copy = actor.options(scheduling_strategy=here).remote(spec.run)
    try:
        yield replace(spec, stored=replace(spec.stored, copy=copy))
    finally:
        with suppress(Exception):  # of a Ray that is going
            ray.kill(copy)


@contextmanager
def with_copy(spec: WorkerSpec) -> Iterator[tuple[WorkerSpec, RunHome | None]]:
    """In a worker of Ray Train, called by all at once: the spec by the folder that this machine has, and its home.

    Where one of the workers does not see the driver's copy, each node has a copy of its own, until this group ends.

    Raises:
        UserError: the store does not give the run.
    """
    if spec.stored is None:
        yield spec, None
        return
    with patient_group() as group:
        if is_shared := all(all_do(partial(sees, spec.run, spec.stored.driver), group)):
            is_first = group is None or dist.get_rank() == 0
            all_do(partial(catch_up, RunHome(spec.run)) if is_first else bool, group)  # others may have been apart
        else:
            spec = _brought(spec, group)
    home = RunHome(spec.run)
    if is_shared:
        yield spec, home
        return
    home.know_small_files()
    with _relaying(spec, home):
        yield spec, home
    if spec.leads:
        shutil.rmtree(spec.run, ignore_errors=True)


def _brought(spec: WorkerSpec, group: Any) -> WorkerSpec:
    """The spec by a copy of this node's own, which the first of its workers has made."""
    assert spec.stored is not None
    address, driver = spec.stored.address, spec.stored.driver
    run = workers_place(address, ray.get_runtime_context().get_node_id())
    leads = ray.train.get_context().get_local_rank() == 0
    all_do(partial(bring_for_workers, run, address, driver) if leads else bool, group)
    return replace(spec, run=run, leads=leads)


@contextmanager
def _relaying(spec: WorkerSpec, home: RunHome) -> Iterator[None]:
    """On rank 0: while the block runs, the driver hears of it, always before the store does."""
    if ray.train.get_context().get_world_rank() != 0:
        yield
        return
    assert spec.stored is not None
    relay = Relay(spec.stored.copy, spec.run)
    home.before_commit = relay.exchange
    with exchanging(relay):
        yield
    with suppress(Exception):  # all that matters is committed
        home.put_small_files()


def sees(run: Path, driver: str) -> bool:
    """Whether this machine sees the copy of a run that a driver has.

    Where it has a folder of that name, it may see an older state of it for a while.
    """
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        with suppress(OSError):
            if (home := home_of(run)) is not None and home.driver == driver:
                return True
            if run.exists() and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
        return False
