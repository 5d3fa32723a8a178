"""Token shards: Arrow IPC files of fixed-size rows, memory-mapped, with a manifest."""

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokendrop.errors import UserError

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of rows."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a folder of token shards holds; written last, so its presence says that the folder is whole."""

    sequence_length: int
    vocab_size: int
    tokenizer_sha256: str
    documents: int
    characters: int
    tokens: int
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        UserError: there is none, or it can't be read.
    """
    try:
        tree = json.loads((folder / MANIFEST).read_text())
        splits = {
            split: tuple(Shard(**shard) for shard in tree.pop(split)) for split in ("train", "validation")
        }
        return Manifest(**tree, **splits)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder / MANIFEST}: can't read this manifest ({error}); prepare the data again"
        ) from None


def write_shard(path: Path, rows_NT: NDArray[np.integer]) -> Shard:
    """Write rows (N, tokens) of uint16 or uint32."""
    values = pa.array(np.ascontiguousarray(rows_NT).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, rows_NT.shape[1])
    batch = pa.record_batch([column], names=["tokens"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return Shard(file=path.name, rows=len(rows_NT), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


class Rows:
    """The rows of one split by number, read from mapped memory."""

    def __init__(self, folder: Path, manifest: Manifest, split: Split) -> None:
        shards = manifest.train if split == "train" else manifest.validation
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self._shards = [_map(folder / shard.file, shard, manifest) for shard in shards]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows by number, (len(rows), sequence_length + 1)."""
        return np.stack([self._row(int(row)) for row in rows]).astype(np.int64)

    def _row(self, row: int) -> NDArray[np.integer]:
        shard = bisect_right(self._starts, row) - 1
        return self._shards[shard][row - self._starts[shard]]


def _map(path: Path, shard: Shard, manifest: Manifest) -> NDArray[np.integer]:
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: can't read this token shard ({error}); prepare the data again") from None
    rows_NT = batch.column(0).values.to_numpy(zero_copy_only=True).reshape(batch.num_rows, -1)
    wanted = (shard.rows, manifest.sequence_length + 1)
    if rows_NT.shape != wanted:
        raise UserError(f"{path}: want {wanted} rows and tokens as the manifest says, found {rows_NT.shape}")
    return rows_NT
