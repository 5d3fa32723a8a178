"""Other libraries that shuffle and read the same rows, each as its documentation recommends for speed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from tokendrop.bench.reading import MICRO_BATCH, Epoch
from tokendrop.data.shards.manifest import read_manifest

BUFFER = 2048


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that may be installed."""

    name: str
    module: str
    install: str
    epochs: Callable[[list[pa.Table]], dict[str, Epoch]]
    """Its ways to read these tables: all rows shuffled by its own name, fewer mixed by buffers of BUFFER rows, and
    in order."""

    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return find_spec(self.module) is not None


def read_tables(folder: Path) -> list[pa.Table]:
    """The mapped tokens of a folder of training shards."""
    tables: list[pa.Table] = []
    for shard in read_manifest(folder).shards:
        if shard.split != "train":
            continue
        with pa.memory_map(str(folder / shard.file)) as file:
            tables.append(pa.ipc.open_file(file).read_all().select(["tokens"]))
    return tables


def _ray_data(tables: list[pa.Table]) -> dict[str, Epoch]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = ray.data.from_arrow(tables)
    options: dict[str, Any] = {"batch_size": MICRO_BATCH, "dtypes": torch.int64}

    def tokens(batches: Any) -> Iterator[Tensor]:
        return (batch["tokens"] for batch in batches)

    return {
        "ray_data": lambda: tokens(rows.random_shuffle().iter_torch_batches(**options)),
        "ray_data_buffer": lambda: tokens(rows.iter_torch_batches(local_shuffle_buffer_size=BUFFER, **options)),
        "ray_data_sequential": lambda: tokens(rows.iter_torch_batches(**options)),
    }


def _hugging_face(tables: list[pa.Table]) -> dict[str, Epoch]:
    import datasets
    from datasets.table import InMemoryTable

    datasets.disable_progress_bars()
    rows = datasets.Dataset(InMemoryTable(pa.concat_tables(tables)))

    def tokens(rows: Any, form: str) -> Iterator[Tensor]:
        for batch in rows.with_format(form).iter(batch_size=MICRO_BATCH):
            yield torch.as_tensor(batch["tokens"]).to(torch.int64)

    def buffered() -> Iterator[Tensor]:
        stream = rows.to_iterable_dataset(num_shards=len(tables)).shuffle(seed=1, buffer_size=BUFFER)
        return tokens(stream, "torch")

    return {
        "hugging_face": lambda: tokens(rows.shuffle(seed=1), "numpy"),
        "hugging_face_buffer": buffered,
        "hugging_face_sequential": lambda: tokens(rows, "numpy"),
    }


PEERS = (
    Peer("ray_data", "ray", "pip install 'tokendrop[platform]'", _ray_data),
    Peer("hugging_face", "datasets", "pip install 'tokendrop[bench]'", _hugging_face),
)
