"""The stages of preparation on Ray Data: read -> tokenize, in the order of the corpus."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

from tokendrop.data.corpus.records import Record, RecordForm, read_records
from tokendrop.data.corpus.sources import SourceFile
from tokendrop.errors import UserError

# What a block of documents that goes from one stage to the next may hold; the last document may go over.
_BLOCK_CHARACTERS, _BLOCK_DOCUMENTS = 8_000_000, 16_384

# Reading costs a tenth of what tokenizing does: one reader keeps eight cores busy. Ray takes its time between two
# tasks, so three tokenizers share two cores.
_READER_CPUS, _TOKENIZER_CPUS, _CPUS_PER_READER = 0.1, 0.6, 8

_MOST_ATTEMPTS = 2
_END = "end of the file"
"""In the place of an error: the line behind the last record of a file."""
_DIES = (
    f"the process that reads or tokenizes this file died {_MOST_ATTEMPTS} times;"
    " want a file that is whole, and nodes with enough memory"
)


@dataclass(frozen=True, slots=True)
class Work:
    """A file that is to be read."""

    number: int
    file: SourceFile
    form: RecordForm
    after: int
    """Records to leave out."""
    split: str = ""
    """Of all of its documents; empty where each goes by its hash."""


def tokenized(work: list[Work], tokenize: Callable[[pa.Table], pa.Table]) -> Iterator[pa.Table]:
    """Blocks of tokenized records, each of one file, in the order of the work, whatever the number of workers.

    Args:
        tokenize: of a block of records, see tokenize.py.
    Raises:
        UserError: a file can't be read. It travels to here as a line with an `error`: a task that raised it
            instead would be tried again, and reported with Ray's traceback. Or the processes that read or tokenize
            it die again and again.
        RayError: processes of the cluster die for another reason.
    """
    _hide_progress_logs()
    left = deque(work)
    while left:
        readers = _readers()
        with closing(_round([*left], readers, tokenize)) as parts:
            for part in parts:
                yield part
                _leave_out(left, part)
                if _readers() >= 2 * readers:  # nodes have come, on which more files can be read at a time
                    break
            else:
                return


def _readers() -> int:
    """Files that are read at a time, by the cores that the cluster has now."""
    return ceil(ray.cluster_resources().get("CPU", 1) / _CPUS_PER_READER)


def _leave_out(left: deque[Work], part: pa.Table) -> None:
    """What comes before the end of a block has been read."""
    file, record = part.column("file")[-1].as_py(), part.column("record")[-1].as_py()
    while left[0].number != file:
        left.popleft()
    left[0] = replace(left[0], after=record)


def _round(work: list[Work], readers: int, tokenize: Callable[[pa.Table], pa.Table]) -> Generator[pa.Table]:
    """Blocks of tokenized records, by so many readers."""
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = _BLOCK_CHARACTERS  # without one, a block is a whole file
    context.enable_progress_bars = False
    attempts: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Attempts).remote()
    read = partial(_counted_read, attempts=attempts, work=work, block=(_BLOCK_CHARACTERS, _BLOCK_DOCUMENTS))
    tokenize = partial(_counted_tokenize, attempts=attempts, tokenize=tokenize)
    at_most = ray.data.TaskPoolStrategy(size=readers)
    with ray.data.DataContext.current(context):
        blocks: Iterable[Any] = (
            ray.data.from_items([*range(len(work))], override_num_blocks=min(len(work), 64))
            .map_batches(read, batch_size=1, num_cpus=_READER_CPUS, compute=at_most)
            .map_batches(tokenize, batch_format="pyarrow", batch_size=None, num_cpus=_TOKENIZER_CPUS)
            .iter_batches(batch_size=None, batch_format="pyarrow")
        )
    whole = _WholeFiles(work)
    for block in blocks:
        yield from _by_file(whole.records(block))
    whole.check()


class _WholeFiles:
    """Sees to it that every file comes to its end before the next one begins.

    What Ray Data has of a task whose process died it keeps. Of what the task gives when it is begun anew it takes only
    what is beyond that: where this is less, the task counts as done, and nobody is told.
    """

    def __init__(self, work: list[Work]) -> None:
        self._left = deque(work)

    def records(self, block: pa.Table) -> pa.Table:
        """A block without the lines that tell of ends; raises UserError for an error, or where an end has not come."""
        files, errors = block.column("file").to_pylist(), block.column("error").to_pylist()
        for file, error in zip(files, errors, strict=True):
            if error == _DIES or file != self._left[0].number:
                self.check()
            if error == _END:
                self._left.popleft()
            elif error:
                raise UserError(error)
        return block.filter(pa.array([error != _END for error in errors])) if _END in errors else block

    def check(self) -> None:
        """Raises UserError where a file has not come to its end."""
        if self._left:
            raise UserError(f"data.corpus: {self._left[0].file.name}: {_DIES}")


class _Attempts:
    """How often something was begun and not ended, by any process of the cluster.

    Ray Data begins a task whose process dies anew for ever, with all files of the task.
    """

    def __init__(self) -> None:
        self._open: Counter[tuple[str, int, int]] = Counter()

    def begin(self, *what: Any) -> int:
        """Count one more attempt; how many have not ended now."""
        self._open[what] += 1
        return self._open[what]

    def end(self, *what: Any) -> None:
        """The last attempt did not die."""
        self._open[what] -= 1


def _dies(attempts: Any, *what: Any) -> bool:
    """Whether processes that began this before have died, more often than by chance."""
    count: Any = ray.get(attempts.begin.remote(*what))
    return count > _MOST_ATTEMPTS


def _by_file(block: pa.Table) -> Iterator[pa.Table]:
    """Ray puts small blocks together."""
    files = block.column("file").to_numpy()
    edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
    for first, last in pairwise(edges):
        if last > first:
            yield block.slice(first, last - first)


def _hide_progress_logs() -> None:
    """Ray Data tells of every execution on the console; importing it has set that up anew."""
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.CRITICAL)  # what fails is raised, too


def _counted_read(batch: Any, *, attempts: Any, work: list[Work], block: tuple[int, int]) -> Iterator[pa.Table]:
    one = work[batch["item"][0]]
    if _dies(attempts, "read", one.number, one.after):
        yield _block(one.number, [], _DIES)
    else:
        yield from _read(batch, work=work, block=block)
    attempts.end.remote("read", one.number, one.after)


def _counted_tokenize(block: pa.Table, *, attempts: Any, tokenize: Callable[[pa.Table], pa.Table]) -> pa.Table:
    if not block.num_rows:
        return tokenize(block)
    what = "tokenize", block["file"][0].as_py(), block["record"][0].as_py()
    if _dies(attempts, *what):
        block = _block(block["file"][0].as_py(), [], _DIES)
    done = tokenize(block)
    attempts.end.remote(*what)
    return done


def _read(batch: Any, *, work: list[Work], block: tuple[int, int]) -> Iterator[pa.Table]:
    longest, most = block
    one = work[batch["item"][0]]
    records: list[Record] = []
    characters = 0
    error = _END
    try:
        for record in read_records(one.file, one.form, after=one.after):
            records.append(record)
            characters += len(record.text) + len(record.content)
            if characters >= longest or len(records) >= most:
                yield _block(one.number, records, split=one.split)
                records, characters = [], 0
    except UserError as wrong:
        error = str(wrong)
    yield _block(one.number, records, error, split=one.split)


def _block(file: int, records: list[Record], error: str = "", *, split: str = "") -> pa.Table:
    """Records for the next stage; an error takes a line of its own."""
    lines = [*records, Record(0, "", "", "")] if error else records
    return pa.table(
        {
            "file": pa.array([file] * len(lines), pa.int32()),
            "record": pa.array([line.number for line in lines], pa.int64()),
            "text": pa.array([line.text for line in lines], pa.large_string()),
            "content": pa.array([line.content for line in lines], pa.large_binary()),
            "split": pa.array([split] * len(lines), pa.string()),
            "subset": pa.array([line.subset for line in lines], pa.string()),
            "reason": pa.array([line.reason for line in lines], pa.string()),
            "error": pa.array([""] * len(records) + [error] * bool(error), pa.string()),
        }
    )
