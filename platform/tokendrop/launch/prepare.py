"""Token shards in the background: training starts on the first of them and follows the preparation of the rest."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import floor
from pathlib import Path
from types import TracebackType

import ray

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.cut_examples import note_of_cut
from tokendrop.data.prepare.pipeline import NOT_TO_THE_END, Corpus, StoppedError, find_corpus, is_complete, prepare
from tokendrop.data.prepare.stored import bytes_at_once, stored_shards
from tokendrop.data.read.row_reader import FAILED, note_failure, noted_failure
from tokendrop.data.shards.cache import ShardCache
from tokendrop.data.shards.format import MANIFEST
from tokendrop.data.shards.manifest import Manifest, ManifestReader, read_header, read_manifest
from tokendrop.errors import UserError, cause_of
from tokendrop.launch.room import Resources, count_places, resources_of
from tokendrop.launch.watch import prepare_line
from tokendrop.output import log

_POLL_S = 0.2


class Preparation:
    """While its block runs, a thread prepares a job's token shards; what is committed when the block ends stays.

    The order of samples depends on the corpus alone, so a run is the same however far this has come.
    """

    def __init__(self, config: ExperimentConfig, shards: Path | None = None) -> None:
        """
        Args:
            shards: where all of them are made already, as they are in a store; the corpus is not looked at then.
        Raises:
            UserError: the corpus can't be listed, or the store does not have what the job wants.
        """
        self.config, self.shards = config, shards or stored_shards(config)
        if self.shards is None:
            self._corpus: Corpus | None = find_corpus(config)
            self.folder = self._corpus.folder
        else:
            self._corpus, self.folder = None, self.shards
        self._most_workers = config.most_workers
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    def __enter__(self) -> "Preparation":
        if not (self.folder / MANIFEST).exists():
            log(f"prepare  token shards in {self.folder}")
        if self.config.data.is_stored:
            _tell_store(self.config, self.folder)
        with suppress(OSError):  # what an earlier start has left; they may be on storage that is read-only
            (self.folder / FAILED).unlink(missing_ok=True)
        self._done = self._pool.submit(self._prepare)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._pool.shutdown()
        failure = self._done.exception()
        if kind is UserError and failure and not isinstance(failure, StoppedError):
            raise failure  # of which the workers knew only by the note that it left
        if kind is None and isinstance(failure, UserError):
            raise failure  # of which workers that had all of their rows did not know

    @property
    def is_done(self) -> bool:
        """Whether all token shards are written."""
        return self._done.done()

    def wait(self) -> Path:
        """The folder, as soon as training can start on it.

        That is when its first rows are committed and a node has come that keeps a core for preparation, wherever the
        workers are put; where there is none, workers that wait for rows would keep them from being made, and all is
        prepared first.

        Raises:
            UserError: the corpus or the tokenizer is wrong.
        """
        reader = ManifestReader(self.folder)
        while not self._done.done():
            time.sleep(_POLL_S)
            # once all is there, preparation is over in a moment, and may have something to say
            is_growing = (self.folder / MANIFEST).exists() and not read_header(self.folder).is_complete
            if is_growing and can_start(self.config, reader.refresh()) and self._keeps_a_core():
                return self.folder
        return self._done.result()

    def _keeps_a_core(self) -> bool:
        """Whether preparation goes on beside the workers, by the nodes that the cluster has now."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return keeps_a_core(nodes, resources_of(self.config.scaling), workers=self._most_workers)

    def _prepare(self) -> Path:
        if self.shards is not None:
            return self.shards
        with prepare_line(self.config) as progress:

            def tell(documents: int, tokens: int) -> None:
                if self._stop.is_set():
                    raise StoppedError
                progress(documents, tokens)

            try:
                is_new = not is_complete(self.folder)
                folder = prepare(self.config, corpus=self._corpus, progress=tell)
            except (UserError, StoppedError):
                raise
            except Exception as error:  # before it held the lock: the workers would wait for rows that never come
                if noted_failure(self.folder) is None:
                    note_failure(self.folder, f"{self.folder}: {NOT_TO_THE_END} ({cause_of(error)})")
                raise
        if is_new and (note := note_of_cut(folder)):
            log(f"note     {note}")
        return folder


def _tell_store(config: ExperimentConfig, folder: Path) -> None:
    """Say where token shards come from, and where the caches of the nodes are too small for that to be once."""
    cache, manifest = config.data.cache, read_manifest(folder)
    log(f"read     {len(manifest.shards)} token shards of {ShardCache(folder).store.name('')} through {folder}")
    if (size := bytes_at_once(config, manifest)) > cache.max_bytes:
        log(
            f"warning  data.cache.max_bytes: {cache.max_bytes:,} for {size:,} bytes that this run goes back to again"
            " and again: each node fetches them as often; want as many, or one epoch and a smaller data.shuffle_rows"
        )


def can_start(config: ExperimentConfig, manifest: Manifest) -> bool:
    """Whether training can start before all is prepared: the first samples are known, the held-out rows are there."""
    train, validation = manifest.committed("train"), manifest.committed("validation")
    wanted = config.data.held_out_shares(config.evaluate.sequences)
    return (
        not train.is_complete  # else preparation is over in a moment, and may have something to say
        and 0 < config.data.shuffle_rows <= min(train.rows)
        and all(have >= count for have, count in zip(validation.rows, wanted, strict=True))
    )


def keeps_a_core(nodes: list[Resources], each: Resources, *, workers: int) -> bool:
    """Whether a node has a core left for preparation, however so many workers are spread over these nodes."""
    to_fill = 0
    for node in nodes:
        if node.get("CPU", 0) < 1:
            continue
        takes_last = floor((node["CPU"] - 1) / each["CPU"]) + 1  # with so many workers less than a core is left
        if takes_last > count_places([node], each):
            return True
        to_fill += takes_last
    return to_fill > workers
