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

from tokendrop.config.load import build
from tokendrop.errors import UserError

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
Split = Literal["train", "validation"]

_TOKEN_TYPES = (pa.uint16(), pa.uint32())


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
        return build(Manifest, json.loads((folder / MANIFEST).read_text()), "")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder / MANIFEST, error) from None


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
        """
        Raises:
            UserError: a shard can't be read, or is not what the manifest says.
        """
        shards = manifest.train if split == "train" else manifest.validation
        self._files = [folder / shard.file for shard in shards]
        self._row_length, self._vocab_size = manifest.sequence_length + 1, manifest.vocab_size
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self._shards = [_map(folder / shard.file, (shard.rows, self._row_length)) for shard in shards]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows by number, (len(rows), sequence_length + 1).

        Raises:
            UserError: a token is none of the tokenizer's; on a GPU it would end the process without a word.
        """
        tokens_NT = np.empty((len(rows), self._row_length), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            shard = bisect_right(self._starts, row) - 1
            tokens_NT[place] = self._shards[shard][row - self._starts[shard]]
        if tokens_NT.max(initial=0) >= self._vocab_size:
            row = int(rows[(tokens_NT >= self._vocab_size).any(axis=1).argmax()])
            file = self._files[bisect_right(self._starts, row) - 1]
            raise _damaged(file, f"a token over the tokenizer's {self._vocab_size} in row {row}")
        return tokens_NT


def _map(path: Path, shape: tuple[int, int]) -> NDArray[np.integer]:
    try:
        with pa.memory_map(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        batch.validate()  # a damaged file may point outside of itself
        column = batch.column(0)
        if not pa.types.is_fixed_size_list(column.type) or column.type.value_type not in _TOKEN_TYPES:
            raise _damaged(path, f"{column.type} instead of rows of tokens")
        rows_NT = column.values.to_numpy(zero_copy_only=True).reshape(batch.num_rows, -1)
    except UserError:
        raise
    except (OSError, ValueError, IndexError, pa.ArrowException) as error:
        raise _damaged(path, error) from None
    if rows_NT.shape != shape:
        raise _damaged(path, f"want {shape} rows and tokens as the manifest says, found {rows_NT.shape}")
    return rows_NT


def _damaged(path: Path, reason: Exception | str) -> UserError:
    reason = " ".join(str(reason).split())
    return UserError(f"{path}: damaged ({reason}); remove {path.parent} and prepare the data again")
