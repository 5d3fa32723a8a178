"""Documents' tokens, end to end, cut into rows of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokendrop.data.shards.format import DOCUMENTS, Place, SubsetCounts

_MOST_CONTENTS = 2**27  # bytes of images in one shard, but for the last; a shard is written from memory


@dataclass(frozen=True, slots=True)
class Documents:
    """Tokenized documents of one stream, in the order of its source; all arrays have an entry for each of the D."""

    tokens_N: NDArray[np.integer]
    lengths_D: NDArray[np.int64]
    """Tokens of each; they lie one after the other in tokens_N."""
    subsets_D: Sequence[str]
    files_D: NDArray[np.int64]
    records_D: NDArray[np.int64]
    seen_D: NDArray[np.int64]
    """Records of the source before each."""
    bytes_D: NDArray[np.int64]
    sentences_N: NDArray[np.int64] | None = None
    """Tokens of each of their sentences, one after the other too, where text is split into sentences."""
    contents_D: Sequence[bytes] = ()
    """The file of each, where they are images, each of which has one row."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What one shard is made of."""

    rows_NT: NDArray[np.integer]
    documents: pa.Array
    """Of each row, as `DOCUMENTS` has them."""
    subsets: tuple[SubsetCounts, ...]
    next: Place
    contents: list[bytes] | None = None
    """Of each row, where they are of images."""


class Packer:
    """Rows come out in the order in which tokens go in; where a document begins does not matter.

    The columns of `_index` are start, end, subset, file, record, seen and bytes, a line for each document that waits.
    Starts and ends count from the first token that waits; the first document may have begun before it.
    """

    def __init__(self, row_length: int, *, begin: Place | None = None) -> None:
        """
        Args:
            begin: leave out what comes before.
        """
        self.row_length, self._begin = row_length, begin
        self._subsets = SubsetCodes()
        self._waiting: list[NDArray[np.integer]] = []
        self._index: list[NDArray[np.int64]] = []
        self._contents: list[bytes] = []
        self._tokens = 0

    def add(self, documents: Documents) -> None:
        """Take in more documents, in the order of their source."""
        ends = np.cumsum(documents.lengths_D)
        starts = ends - documents.lengths_D
        columns = (documents.files_D, documents.records_D, documents.seen_D, documents.bytes_D)
        index = np.stack([starts, ends, self._subsets.of(documents.subsets_D), *columns])
        first = 0
        if self._begin is not None:
            first, index = _from(self._begin, index)
            if index.shape[1] == 0:
                return
            self._begin = None
        tokens_N = documents.tokens_N[first:]
        index[:2] += self._tokens - first
        self._waiting.append(tokens_N)
        self._contents += documents.contents_D[len(ends) - index.shape[1] :]
        self._index.append(index[:, index[1] > index[0]])  # an empty document is in no row
        self._tokens += len(tokens_N)

    def rows_ready(self) -> int:
        """Whole rows that wait to be taken."""
        return self._tokens // self.row_length

    def shard_ready(self, size: int) -> int:
        """Rows of the next shard, where all of them wait, else 0: so many, or those of enough bytes of images."""
        total = 0
        for number, content in enumerate(self._contents[: size - 1], start=1):
            total += len(content)
            if total >= _MOST_CONTENTS:
                return number
        return size if self.rows_ready() >= size else 0

    def take(self, count: int) -> Packed:
        """The next `count` rows, (count, row_length), with their documents; no more than `rows_ready`."""
        size = count * self.row_length
        tokens_N, index = np.concatenate(self._waiting), np.concatenate(self._index, axis=1)
        last = int(np.searchsorted(index[0], size, side="left")) - 1
        ends_here = index[1, last] <= size
        packed = Packed(
            rows_NT=tokens_N[:size].reshape(count, self.row_length),
            documents=self._documents(index, count),
            subsets=self._counts(index, size),
            next=_place(index[:, last], size),
            contents=self._contents[:count] or None,
        )
        left = index[:, last + int(ends_here) :].copy()
        left[:2] -= size
        self._waiting, self._index, self._tokens = [tokens_N[size:]], [left], self._tokens - size
        del self._contents[:count]
        return packed

    def _documents(self, index: NDArray[np.int64], count: int) -> pa.Array:
        edges = np.arange(count + 1) * self.row_length
        firsts = np.searchsorted(index[0], edges[:-1], side="right") - 1
        lasts = np.searchsorted(index[0], edges[1:], side="left") - 1
        sizes = lasts - firsts + 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        here = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], sizes)
        starts = index[0, here] - np.repeat(edges[:-1], sizes)
        return self._subsets.documents(offsets, starts, index[:, here])

    def _counts(self, index: NDArray[np.int64], size: int) -> tuple[SubsetCounts, ...]:
        begins = (index[0] >= 0) & (index[0] < size)
        return self._subsets.counts(index, np.clip(index[1], 0, size) - np.clip(index[0], 0, size), begins)


class SubsetCodes:
    """Numbers for subsets, as they come; an index has them in line 2, and further columns as `Packer`."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The number of each of D names, (D,)."""
        return np.array([self._codes.setdefault(name, len(self._codes)) for name in names], np.int64)

    def documents(self, offsets: NDArray[np.int64], starts: NDArray[np.int64], index: NDArray[np.int64]) -> pa.Array:
        """The column `DOCUMENTS` of rows, by the place of each row's first document in an index."""
        columns = [pa.array(starts), self._named(index[2]), pa.array(index[3], pa.int32()), pa.array(index[4])]
        values = pa.StructArray.from_arrays(columns, fields=list(DOCUMENTS.value_type))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)

    def counts(
        self, index: NDArray[np.int64], tokens: NDArray[np.int64], begins: NDArray[np.bool_]
    ) -> tuple[SubsetCounts, ...]:
        """Sums by subset, by name, of those of an index that have tokens, and of those that begin here."""
        names, found = list(self._codes), list[SubsetCounts]()
        for code in np.unique(index[2, tokens > 0]).tolist():
            here = index[2] == code
            found.append(
                SubsetCounts(
                    subset=names[code],
                    documents=int(begins[here].sum()),
                    tokens=int(tokens[here].sum()),
                    bytes=int(index[6, here & begins].sum()),
                )
            )
        return tuple(sorted(found, key=lambda one: one.subset))

    def _named(self, codes: NDArray[np.int64]) -> pa.DictionaryArray:
        """Those that occur in the order of the alphabet: codes depend on where packing began."""
        names = list(self._codes)
        used, places = np.unique(codes, return_inverse=True)
        occurring = [names[int(code)] for code in used]
        order = sorted(range(len(used)), key=lambda place: occurring[place])
        values = pa.array([occurring[place] for place in order], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(np.argsort(order)[places], pa.int32()), values)


def _from(begin: Place, index: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """The first token at or after a place, and the documents from there on."""
    files, records = index[3], index[4]
    after = (files > begin.file) | ((files == begin.file) & (records >= begin.record))
    index = index[:, after]
    if index.shape[1] == 0:
        return 0, index
    is_cut = (index[3, 0], index[4, 0]) == (begin.file, begin.record)
    return int(index[0, 0]) + (begin.token if is_cut else 0), index


def _place(document: NDArray[np.int64], size: int) -> Place:
    """Where the tokens from `size` on begin: in this document, or after it where it ends there."""
    start, end, _, file, record, seen, _ = document.tolist()
    if end > size:
        return Place(file=file, record=record, token=size - start, seen=seen)
    return Place(file=file, record=record + 1, token=0, seen=seen + 1)
