"""Fetching ahead: shards that a run reads next are on their way before they are asked for."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tokendrop.data.shards.format import ShardFile

_THREADS = 8  # requests at a time, of one process
_ENDS_WITHIN_S = 1.0

Fetch = Callable[[ShardFile, Collection[str]], None]
"""Fetches a shard; beside it, the files of all that are needed soon."""


@dataclass
class _Wanted:
    changed: threading.Condition = field(default_factory=threading.Condition)
    files: Collection[str] = ()
    left: deque[ShardFile] = field(default_factory=deque[ShardFile])
    at_work: set[str] = field(default_factory=set[str])
    is_over: bool = False


class ReadAhead:
    """Fetches shards, some at a time; one that fails is left to whoever reads it, who is told why.

    Its threads are daemons, as that of `Prefetcher`.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._wanted = _Wanted()
        threads = [threading.Thread(target=_serve, args=(fetch, self._wanted), daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, self._wanted, threads)

    def want(self, shards: Sequence[ShardFile]) -> None:
        """From now on these are needed, the first of them first; of those wanted before, no more are begun."""
        wanted = self._wanted
        with wanted.changed:
            wanted.files, wanted.left = frozenset(shard.file for shard in shards), deque(shards)
            wanted.changed.notify_all()


def _end(wanted: _Wanted, threads: Sequence[threading.Thread]) -> None:
    with wanted.changed:
        wanted.is_over = True
        wanted.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_ENDS_WITHIN_S / len(threads))


def _serve(fetch: Fetch, wanted: _Wanted) -> None:
    while True:
        with wanted.changed:
            wanted.changed.wait_for(lambda: wanted.is_over or wanted.left)
            if wanted.is_over:
                return
            shard, files = wanted.left.popleft(), wanted.files
            if shard.file in wanted.at_work:
                continue
            wanted.at_work.add(shard.file)
        with suppress(Exception):
            fetch(shard, files)
        with wanted.changed:
            wanted.at_work.discard(shard.file)
