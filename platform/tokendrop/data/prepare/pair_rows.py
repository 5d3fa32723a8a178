"""Rows for pairs of sentences: runs of whole sentences, each run of one document."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokendrop.data.prepare.pack import Documents, Packed, SubsetCodes
from tokendrop.data.read.order import hashed, uniform
from tokendrop.data.read.pair_runs import FLAGS
from tokendrop.data.shards.format import Place


class PairPacker:
    """`Packer` for pairs of sentences.

    A row takes sentences of its document while they fit and, in a share of the rows, until a random length is reached,
    but at least two. A sentence longer than half a row counts as several, so two always fit. The last of a document is
    not left alone where it can stand with others; one that is alone counts as two halves, and so does a document of
    one sentence. A token that is alone is left out.

    The columns of `_index` are start, end, subset, file, record, seen, bytes and whether it is the document's last, a
    line for each row that waits. Starts and ends count from the document's first token.
    """

    def __init__(self, sequence_length: int, *, short_share: float, begin: Place | None = None) -> None:
        """
        Args:
            begin: leave out what comes before.
        """
        self.room, self.short_share, self._begin = sequence_length - 3, short_share, begin
        self._subsets = SubsetCodes()
        self._waiting: list[NDArray[np.integer]] = []
        self._index: list[NDArray[np.int64]] = []
        self._ready = 0

    def add(self, documents: Documents) -> None:
        """Take in more documents."""
        firsts_D = np.cumsum(documents.lengths_D) - documents.lengths_D
        begins_N, runs_XN = self._cut(documents, firsts_D)
        of_N, starts_N, ends_N = runs_XN
        codes_D = self._subsets.of(documents.subsets_D)
        columns = (codes_D, documents.files_D, documents.records_D, documents.seen_D, documents.bytes_D)
        is_last_N = np.append(of_N[1:] != of_N[:-1], True)[: len(of_N)]
        index = np.stack(
            [starts_N - firsts_D[of_N], ends_N - firsts_D[of_N], *(one[of_N] for one in columns), is_last_N]
        )
        here = _from(self._begin, index)
        self._index.append(index[:, here])
        self._waiting.append(_rows(documents.tokens_N, begins_N, starts_N[here], ends_N[here], self.room))
        self._ready += int(here.sum())

    def rows_ready(self) -> int:
        """Rows that wait to be taken."""
        return self._ready

    def shard_ready(self, size: int) -> int:
        """Rows of the next shard, where all of them wait; else 0."""
        return size if self.rows_ready() >= size else 0

    def take(self, count: int) -> Packed:
        """The next `count` rows, (count, row_length), with their documents; no more than `rows_ready`."""
        rows_NT, index = np.concatenate(self._waiting), np.concatenate(self._index, axis=1)
        self._waiting, self._index = [rows_NT[count:]], [index[:, count:]]
        self._ready -= count
        index = index[:, :count]
        _, end, _, file, record, seen, _, is_last = index[:, -1].tolist()
        after = Place(file=file, record=record + 1, token=0, seen=seen + 1)
        return Packed(
            rows_NT=rows_NT[:count],
            documents=self._subsets.documents(np.arange(count + 1), -index[0], index),
            subsets=self._subsets.counts(index, index[1] - index[0], index[0] == 0),
            next=after if is_last else Place(file=file, record=record, token=end, seen=seen),
        )

    def _cut(self, documents: Documents, firsts_D: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether a sentence begins at each token; and of each row, (3, rows): its document, its start and its end."""
        of_P, starts_P, ends_P = _pieces(documents, longest=self.room // 2)
        begins_N = np.zeros(len(documents.tokens_N), bool)
        begins_N[starts_P] = True
        address = documents.files_D[of_P], documents.records_D[of_P], starts_P - firsts_D[of_P]
        is_short_P = uniform(hashed(0, *address)) < self.short_share
        length_P = 2 + (hashed(1, *address) % np.uint64(self.room - 1)).astype(np.int64)
        targets = np.where(is_short_P, length_P, self.room).tolist()
        ends = ends_P.tolist()
        edges = np.searchsorted(of_P, np.arange(len(firsts_D) + 1)).tolist()
        found = [
            (document, start, end)
            for document, first in enumerate(firsts_D.tolist())
            for start, end in _runs(ends, targets, edges[document], edges[document + 1], first, self.room)
        ]
        runs_XN = np.array(found, np.int64).reshape(-1, 3).T
        before_N = np.cumsum(begins_N)
        alone = before_N[runs_XN[1]] == before_N[runs_XN[2] - 1]
        begins_N[(runs_XN[1] + runs_XN[2])[alone] // 2] = True
        return begins_N, runs_XN[:, runs_XN[2] - runs_XN[1] > 1]


class _Pieces(NamedTuple):
    """Sentences, those that are too long in several pieces of about one length: document, start and end of each."""

    of_P: NDArray[np.int64]
    starts_P: NDArray[np.int64]
    ends_P: NDArray[np.int64]


def _pieces(documents: Documents, *, longest: int) -> _Pieces:
    assert documents.sentences_N is not None, "documents without sentences make no pairs"
    lengths_N = documents.sentences_N[documents.sentences_N > 0].astype(np.int64)
    parts_N = -(-lengths_N // longest)
    of_P = np.repeat(np.arange(len(lengths_N)), parts_N)
    part_P = np.arange(len(of_P)) - (np.cumsum(parts_N) - parts_N)[of_P]
    before_P, lengths_P = (np.cumsum(lengths_N) - lengths_N)[of_P], lengths_N[of_P]
    starts_P, ends_P = (before_P + (part_P + more) * lengths_P // parts_N[of_P] for more in (0, 1))
    return _Pieces(np.searchsorted(np.cumsum(documents.lengths_D), starts_P, side="right"), starts_P, ends_P)


def _runs(
    ends: list[int], targets: list[int], first: int, last: int, start: int, room: int
) -> Iterator[tuple[int, int]]:
    """The rows of one document, which has the pieces from `first` up to `last`: start and end of each."""
    while first < last:
        fitting = bisect_right(ends, start + room, first, last)
        enough = bisect_left(ends, start + targets[first], first, last) + 1
        stop = min(fitting, max(first + 2, enough))
        if stop + 1 == last:
            stop = last if fitting == last else stop - 1 if stop > first + 2 else stop
        yield start, ends[stop - 1]
        first, start = stop, ends[stop - 1]


def _from(begin: Place | None, index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows begin at or after a place."""
    if begin is None:
        return np.ones(index.shape[1], bool)
    starts, files, records = index[0], index[3], index[4]
    in_file = (records > begin.record) | ((records == begin.record) & (starts >= begin.token))
    return (files > begin.file) | ((files == begin.file) & in_file)


def _rows(
    tokens_N: NDArray[np.integer],
    begins_N: NDArray[np.bool_],
    starts_B: NDArray[np.int64],
    ends_B: NDArray[np.int64],
    room: int,
) -> NDArray[np.integer]:
    """Rows as they are stored."""
    dtype = np.result_type(tokens_N.dtype, np.min_scalar_type(max(room, 2**FLAGS - 1)))
    places_BR = starts_B[:, None] + np.arange(room)
    inside_BR = places_BR < ends_B[:, None]
    places_BR[~inside_BR] = 0
    flags_BR = np.zeros((len(starts_B), -(-room // FLAGS) * FLAGS), np.int64)
    rows = np.zeros((len(starts_B), 1 + room + flags_BR.shape[1] // FLAGS), dtype)
    if len(rows):
        flags_BR[:, :room] = begins_N[places_BR] & inside_BR
        rows[:, 0] = ends_B - starts_B
        rows[:, 1 : 1 + room] = np.where(inside_BR, tokens_N[places_BR], 0)
        rows[:, 1 + room :] = flags_BR.reshape(len(rows), -1, FLAGS) @ (1 << np.arange(FLAGS))
    return rows
