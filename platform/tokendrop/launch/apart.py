"""Workers on machines that do not see the copy of a stored run that its driver has: each machine has one of its own.

What is committed they read from the store and write there. The rest goes by an actor on the driver's machine: what the
driver and the policy ask of rank 0, and what rank 0 adds to the live record, and to the few files that change with it.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.atomic import atomic_write
from tokendrop.elastic.control import RunControl
from tokendrop.launch.collectives import all_say
from tokendrop.launch.driver_copy import CHANGING, DriverCopy
from tokendrop.launch.worker import WorkerSpec
from tokendrop.track.journal import METRICS
from tokendrop.track.run_copy import bring_for_workers
from tokendrop.track.run_home import RunHome, home_of
from tokendrop.track.run_store import workers_place

_EVERY_S = 0.1
_ANSWER_S = 60.0  # for the driver's machine
_MOST_BYTES = 2**22  # of the live record at once


class Relay:
    """Rank 0's side: makes its folder begin with the record of the driver's copy, then exchanges what is new."""

    def __init__(self, copy: Any, run: Path) -> None:
        self.run, self._copy = run, copy
        self._lock = threading.Lock()
        record, files = ray.get(copy.begin.remote(), timeout=_ANSWER_S)
        for name, content in {METRICS: record, **files}.items():
            atomic_write(run / name, content)
        self._sent, self._known = len(record), files

    def exchange(self) -> None:
        """Return when the driver's copy has all that is in this folder now.

        Raises:
            ray.exceptions.RayError: the driver's machine does not answer, or does not take it.
        """
        with self._lock:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        """Whether there may be more."""
        with (self.run / METRICS).open("rb") as record:
            record.seek(self._sent)
            lines = record.read(_MOST_BYTES)
        files = {name: (self.run / name).read_bytes() for name in CHANGING if (self.run / name).exists()}
        changed = {name: content for name, content in files.items() if content != self._known.get(name)}
        told: Any = ray.get(self._copy.exchange.remote(self._sent, lines, changed), timeout=_ANSWER_S)
        self._sent, self._known = self._sent + len(lines), files
        RunControl(self.run).tell(told)
        return len(lines) == _MOST_BYTES


@contextmanager
def exchanging(relay: Relay) -> Iterator[None]:
    """While the block runs, a thread exchanges again and again; once more at its end."""
    relay.exchange()
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_EVERY_S):
            with suppress(Exception):  # a commit would fail by it
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

    Where one of the workers does not see the driver's copy, each node has a copy of its own, which goes with the run.

    Raises:
        UserError: the store does not give the run.
    """
    if spec.stored is None or all_say(sees(spec.run, spec.stored.driver)):
        yield spec, home_of(spec.run)
        return
    context = ray.train.get_context()
    leads = context.get_local_rank() == 0
    run = workers_place(spec.stored.address, ray.get_runtime_context().get_node_id())
    home = bring_for_workers(run, spec.stored.address, spec.stored.driver)
    with ExitStack() as work:
        if context.get_world_rank() == 0:
            relay = Relay(spec.stored.copy, run)
            home.before_commit = relay.exchange
            work.enter_context(exchanging(relay))
        yield replace(spec, run=run, leads=leads), home
    if leads and home.committed_step() >= spec.config.steps:
        shutil.rmtree(run, ignore_errors=True)


def sees(run: Path, driver: str) -> bool:
    """Whether this machine sees the copy of a run that a driver has."""
    try:
        home = home_of(run)
    except OSError:
        return False
    return home is not None and home.driver == driver
