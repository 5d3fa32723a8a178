"""Other libraries that shuffle and read the same rows, each as its documentation recommends for speed."""

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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
    epochs: Callable[[list[pa.Table], Path], dict[str, Epoch]]
    """Its ways to read these tables: all rows shuffled by its own name, fewer mixed by buffers of BUFFER rows, and
    in order. It may write below the folder."""

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


def _ray_data(tables: list[pa.Table], scratch: Path) -> dict[str, Epoch]:
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


def _hugging_face(tables: list[pa.Table], scratch: Path) -> dict[str, Epoch]:
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


def _mosaicml(tables: list[pa.Table], scratch: Path) -> dict[str, Epoch]:
    _without_torchvision()
    from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]

    length = tables[0].column("tokens").type.list_size
    with MDSWriter(out=str(scratch / "mds"), columns={"tokens": f"ndarray:uint16:{length}"}) as writer:
        for table in tables:
            for row in table.column("tokens").combine_chunks().flatten().to_numpy().reshape(-1, length):
                writer.write({"tokens": row})
    options: dict[str, Any] = {"local": str(scratch / "mds"), "batch_size": MICRO_BATCH, "num_canonical_nodes": 1}
    shuffled, in_order = StreamingDataset(shuffle=True, **options), StreamingDataset(shuffle=False, **options)

    def tokens(rows: Any) -> Iterator[Tensor]:
        batch: list[np.ndarray] = []
        for row in rows:
            batch.append(row["tokens"])
            if len(batch) == MICRO_BATCH:
                yield torch.from_numpy(np.stack(batch).astype(np.int64))
                batch = []

    return {"mosaicml": lambda: tokens(shuffled), "mosaicml_sequential": lambda: tokens(in_order)}


def _without_torchvision() -> None:
    """Streaming imports torchvision for its image data sets, which rows of tokens do without."""
    if find_spec("torchvision"):
        return
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        module: Any = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.VisionDataset, module.to_tensor = object, None
        sys.modules[name] = module
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


PEERS = (
    Peer("ray_data", "ray", "pip install 'tokendrop[platform]'", _ray_data),
    Peer("hugging_face", "datasets", "pip install 'tokendrop[bench]'", _hugging_face),
    Peer(
        "mosaicml",
        "streaming",
        # its own pins rule out ours
        "pip install --no-deps mosaicml-streaming==0.13.0 Brotli python-snappy cramjam zstd xxhash catalogue",
        _mosaicml,
    ),
)
