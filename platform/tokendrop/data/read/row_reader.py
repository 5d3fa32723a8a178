"""Committed rows by sample id, and samples by their place in the run."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokendrop.config.data import DataConfig
from tokendrop.data.read.ahead import ReadAhead
from tokendrop.data.read.image_rows import is_intact
from tokendrop.data.read.order import ROW_BITS, NotPreparedError, SampleOrder, first_ids, rows_of
from tokendrop.data.shards.cache import cache_of
from tokendrop.data.shards.files import Contents, map_shard, read_documents
from tokendrop.data.shards.format import Committed, ShardFile, Split, damaged, row_checksum
from tokendrop.data.shards.manifest import ManifestReader, shard_files
from tokendrop.errors import UserError

FAILED = "failed.txt"
"""In a folder of token shards: why its preparation stopped, for those who wait for more."""

# Kernels allow some 65,000 mappings a process.
_MAPPED_SHARDS = 8192
_POLL_S = 0.2
_BELIEVED_S = 2.0  # so long a failure stands that nobody takes back, as another run does that goes on with the corpus
_BLOCK = 4096
# of which the shards are fetched meanwhile: those that all workers together read in so many seconds
_AHEAD_S, _FEWEST_AHEAD, _MOST_AHEAD = 40.0, 2, 64

Opened = TypeVar("Opened")


def note_failure(folder: Path, text: str) -> None:
    """Leave word for those who wait for more; on a full disk an empty note has to do."""
    with suppress(OSError):
        (folder / FAILED).write_text(text, errors="backslashreplace")


def noted_failure(folder: Path) -> str | None:
    """Why preparation stopped; None where it did not."""
    try:
        text = (folder / FAILED).read_text(errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    except OSError:
        text = ""
    return text or f"{folder}: its preparation stopped; 'tokendrop prepare' goes on with it, and says what is wrong"


_Mapped = tuple[NDArray[np.integer], NDArray[np.uint64]]
Places = tuple[list[int], list[int]]
"""Of each of some samples the first sample id of its shard, and its row in there; they stay as more rows come."""


class Rows:
    """The rows of one split, read from mapped memory; more appear as preparation goes on.

    A shard's file is looked at when its first row is read. Before training, the driver looks at all of them: see
    `check_files`.
    """

    def __init__(self, folder: Path, split: Split, *, reader: ManifestReader | None = None) -> None:
        """
        Args:
            reader: of the folder's manifest, where the rows of another split are read too.
        Raises:
            DamagedDataError: the manifest can't be read.
        """
        self.folder = folder
        self.split: Split = split
        self._reader = reader or ManifestReader(folder)
        self._cache = cache_of(folder)
        self._ahead: ReadAhead | None = None
        self._mapped: dict[int, _Mapped] = {}
        self._contents: dict[int, Contents] = {}
        self.refresh()

    @property
    def is_cached(self) -> bool:
        """Whether shards come from a store when they are read."""
        return self._cache is not None

    def refresh(self) -> None:
        """Look for rows that were committed since."""
        self.manifest = self._reader.refresh()
        self.committed = self.manifest.committed(self.split)
        self._streams = [self.manifest.stream(source, self.split) for source in self.manifest.header.sources]
        rows = [stream["rows"].to_numpy() for stream in self._streams]
        self._sizes = np.concatenate(rows)
        self._firsts = np.concatenate([n << ROW_BITS | np.cumsum(one) - one for n, one in enumerate(rows)])

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows by sample id, (len(sample_ids), row_length).

        Raises:
            DamagedDataError: a row is not what was written; the message says where.
        """
        return self.read_places(*self.places(sample_ids))

    def places(self, sample_ids: NDArray[np.int64]) -> Places:
        """Where samples are; IndexError where that is nowhere."""
        sources, rows = rows_of(sample_ids, sources=len(self.manifest.header.sources))
        firsts = sources << ROW_BITS | rows
        numbers = np.searchsorted(self._firsts, firsts, side="right") - 1
        inside = firsts - self._firsts[numbers]
        missing = (inside < 0) | (inside >= self._sizes[numbers])
        if missing.any():
            source, row = int(sources[missing][0]), int(rows[missing][0])
            raise IndexError(f"row {row} of source {source}: there are {self.committed.rows[source]}")
        return self._firsts[numbers].tolist(), inside.tolist()

    def shard_at(self, first: int) -> ShardFile:
        """The shard with this first sample id, as `places` gives it."""
        source = first >> ROW_BITS
        of_source, here = np.searchsorted(self._firsts, [source << ROW_BITS, first])
        (shard,) = shard_files(self._streams[source].slice(here - of_source, 1))
        return shard

    def read_places(self, shards: Sequence[int], rows: Sequence[int]) -> NDArray[np.int64]:
        """As `read`, for those who know the places."""
        rows_NT = np.empty((len(rows), self.manifest.header.row_length), np.int64)
        for place, (shard, row) in enumerate(zip(shards, rows, strict=True)):
            tokens_NT, checks_N = self._mapped.get(shard) or self._map(shard)
            tokens_T = tokens_NT[row]
            if row_checksum(tokens_T) != checks_N[row]:
                raise damaged(self.folder / self.shard_at(shard).file, f"row {row} has changed")
            rows_NT[place] = tokens_T
        return rows_NT

    def starts(self, sample_ids: NDArray[np.int64]) -> list[list[int]]:
        """Of each row, at which of its tokens documents begin.

        Raises:
            DamagedDataError: any byte of a row's shard is not what was written; the message says of which.
        """
        shards, rows = self.places(sample_ids)
        of_shards = {first: self._opened(first, self._read_starts) for first in set(shards)}
        return [of_shards[first][row] for first, row in zip(shards, rows, strict=True)]

    def image_files(self, sample_ids: NDArray[np.int64], checksums: NDArray[np.uint64]) -> list[bytes]:
        """The file of each sample's image.

        Args:
            checksums: of the files, as the samples' rows have them.
        Raises:
            DamagedDataError: a file is not what was written; the message says where.
        """
        found: list[bytes] = []
        for first, row, checksum in zip(*self.places(sample_ids), checksums, strict=True):
            if first not in self._contents:
                if len(self._contents) >= _MAPPED_SHARDS:
                    self._contents.pop(next(iter(self._contents)))
                self._contents[first] = self._opened(first, self._open_contents)
            found.append(self._contents[first].read(row))
            if not is_intact(found[-1], checksum):
                raise damaged(self.folder / self.shard_at(first).file, f"the image of row {row} has changed")
        return found

    def _map(self, first: int) -> _Mapped:
        if len(self._mapped) >= _MAPPED_SHARDS:
            self._mapped.pop(next(iter(self._mapped)))
        self._mapped[first] = self._opened(first, self._open_rows)
        return self._mapped[first]

    def _opened(self, first: int, read: Callable[[ShardFile], Opened]) -> Opened:
        """What `read` makes of a shard, which comes from its store where it is not here."""
        shard = self.shard_at(first)
        return read(shard) if self._cache is None else self._cache.opened(shard, read)

    def _open_rows(self, shard: ShardFile) -> _Mapped:
        shape = shard.rows, self.manifest.header.row_length
        return map_shard(self.folder / shard.file, shape, size=shard.bytes)

    def _read_starts(self, shard: ShardFile) -> list[list[int]]:
        rows = read_documents(self.folder, shard, range(shard.rows))
        return [[start for one in row if (start := one["start"]) >= 0] for row in rows]

    def _open_contents(self, shard: ShardFile) -> Contents:
        return Contents(self.folder / shard.file, shard.rows, size=shard.bytes)

    def expect(self, firsts: Sequence[int]) -> None:
        """Have shards come from their store before they are read, by their first sample ids in the order of need.

        Others are mapped no longer: so the bytes of those that make room for these become free.
        """
        if self._cache is None:
            return
        for mapped in (self._mapped, self._contents):
            for first in [*mapped.keys() - set(firsts)]:
                del mapped[first]
        if self._ahead is None:
            self._ahead = ReadAhead(self._cache.fetch_ahead)
        lines = pa.concat_tables(self._streams).take(pa.array(np.searchsorted(self._firsts, firsts)))
        self._ahead.want(shard_files(lines))


class MappedSamples:
    """Training samples by their positions in the run, waiting for preparation where it is behind."""

    def __init__(self, rows: Rows, order: SampleOrder, *, end: int | None = None, together: int = 1) -> None:
        """
        Args:
            end: the first position that is not read any more, where it is known.
            together: positions of a step. All of them are waited for: workers that have theirs would wait in a
                collective, with its timeout, for one that has not.
        """
        self.rows, self.order, self.end, self.together = rows, order, end, together
        self._block = -1
        self._at_hand = range(0)  # positions of the last steps that were waited for
        self._found_at = 0.0
        self._ids = np.empty(0, np.int64)
        self._places: Places = [], []

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and their rows (B, row_length).

        Raises:
            UserError: a row is damaged, or preparation stopped before it came to one.
        """
        wanted = positions.tolist()
        first, last = min(wanted), max(wanted)
        if not self.rows.committed.is_complete:
            self._wait_for_steps(first, last)
        if first // _BLOCK == last // _BLOCK != self._block:
            self._find(first // _BLOCK)
        if not first // _BLOCK == last // _BLOCK == self._block:
            ids = self.order.sample_ids(positions, self.rows.committed)
            return ids, self.rows.read(ids)
        start, (shards, rows) = self._block * _BLOCK, self._places
        places = [shards[n - start] for n in wanted], [rows[n - start] for n in wanted]
        return self._ids[positions - start], self.rows.read_places(*places)

    def _find(self, block: int) -> None:
        """Many samples at a time, for a few cost as much as thousands; they may reach beyond what is prepared."""
        positions = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
        try:
            ids = self.order.sample_ids(positions, self.rows.committed)
        except NotPreparedError:
            return
        if self.rows.is_cached:
            self.rows.expect(self._shards_from(positions[0], 1 + self._blocks_ahead(block)))
        self._block, self._ids, self._places = block, ids, self.rows.places(ids)

    def _blocks_ahead(self, block: int) -> int:
        """By how long the last one was read."""
        now, before = time.monotonic(), self._found_at
        self._found_at = now
        if not 0 <= self._block < block or now <= before:
            return _FEWEST_AHEAD
        blocks = _AHEAD_S * (block - self._block) / (now - before)
        return ceil(min(max(_FEWEST_AHEAD, blocks), _MOST_AHEAD))

    def _shards_from(self, position: int, blocks: int) -> list[int]:
        """The shards of so many blocks by their first sample ids, in the order in which they are read."""
        end = position + blocks * _BLOCK
        positions = np.arange(position, end if self.end is None else max(position + 1, min(end, self.end)))
        shards, _ = self.rows.places(self.order.sample_ids(positions, self.rows.committed))
        return [*dict.fromkeys(shards)]

    def _wait_for_steps(self, first: int, last: int) -> None:
        """Return once all samples of the steps with these positions are committed."""
        start, end = first // self.together * self.together, (last // self.together + 1) * self.together
        if start >= self._at_hand.start and end <= self._at_hand.stop:
            return
        positions = np.arange(start, end)
        failure, since = None, time.monotonic()
        while True:
            try:
                self.order.sample_ids(positions, self.rows.committed)
                self._at_hand = range(start, end)
                return
            except NotPreparedError:
                if failure and time.monotonic() - since > _BELIEVED_S:  # the rows may have been committed before it
                    raise UserError(failure) from None
                time.sleep(_POLL_S)
                if (noted := noted_failure(self.rows.folder)) != failure:
                    failure, since = noted, time.monotonic()
                self.rows.refresh()


def sample_order(data: DataConfig, *, seed: int) -> SampleOrder:
    """The order of a job's samples."""
    return SampleOrder(seed=seed, weights=[source.weight for source in data.mixture], window=data.shuffle_rows)


def held_out_ids(data: DataConfig, committed: Committed, sequences: int) -> NDArray[np.int64]:
    """Sample ids of the first held-out rows, of each source by its weight; fewer where fewer were held out."""
    counts = data.held_out_counts(sequences, committed.rows)
    return np.concatenate([first_ids(source, count) for source, count in enumerate(counts)])
