"""A task's samples where each is a row of a folder of token shards."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.batch import Batch, HeldOut, Samples

if TYPE_CHECKING:  # a model is built and timed without pyarrow
    from tokendrop.data.read.order import SampleOrder
    from tokendrop.data.read.row_reader import Rows
    from tokendrop.data.shards.format import Split


class RowData(ABC):
    """`TaskData` of tasks that read rows."""

    def __init__(self, config: ExperimentConfig, shards: Path) -> None:
        from tokendrop.data.shards.manifest import ManifestReader

        self.config, self.shards = config, shards
        self._manifest = ManifestReader(shards)
        self._rows: dict[Split, Rows] = {}

    @abstractmethod
    def batch(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int) -> Batch:
        """A micro batch of rows, on the host; arguments as of `TaskData`."""

    @cached_property
    def samples(self) -> Samples:
        """Training samples by their places in the run."""
        from tokendrop.data.read.row_reader import MappedSamples

        return MappedSamples(self.rows("train"), self.order, end=self.end, together=self.config.train.global_batch)

    def held_out(self, split: "Split" = "validation") -> HeldOut:
        """The first held-out rows, of each source by its weight."""
        rows = self.rows(split)
        ids = self.held_out_ids(rows)
        return ids, rows.read(ids)

    def judge(self, split: "Split", loss: float, outputs: Tensor | None, tokenizer: Any) -> dict[str, float]:
        """None but those of `Loss`."""
        return {}

    def held_out_ids(self, rows: "Rows") -> NDArray[np.int64]:
        """Which rows of a split are read."""
        from tokendrop.data.read.row_reader import held_out_ids

        return held_out_ids(self.config.data, rows.committed, self.config.evaluate.sequences)

    def rows(self, split: "Split") -> "Rows":
        """Those of a split by their ids, the same object for all who read them: it learns of rows that come later."""
        from tokendrop.data.read.row_reader import Rows

        if split not in self._rows:
            self._rows[split] = Rows(self.shards, split, reader=self._manifest)
        return self._rows[split]

    @property
    def end(self) -> int:
        """Samples of the whole run."""
        return self.config.steps * self.config.train.global_batch

    @property
    def order(self) -> "SampleOrder":
        """Which sample is trained on at which place of the run."""
        from tokendrop.data.read.row_reader import sample_order

        return sample_order(self.config.data, seed=self.config.seed)
