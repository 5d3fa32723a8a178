"""Tokenized documents into a folder of token shards."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokendrop.data.pack import Packer
from tokendrop.data.shards import TOKENIZER, Manifest, Shard, Split, write_shard
from tokendrop.data.tokenizer import vocab_size


class ShardWriter:
    """Packs documents into rows and rows into shards; the manifest comes last."""

    def __init__(self, folder: Path, *, tokenizer: Tokenizer, sequence_length: int, rows_per_shard: int) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.sequence_length, self.rows_per_shard = sequence_length, rows_per_shard
        self.documents = self.characters = self.tokens = 0
        self._vocab_size = vocab_size(tokenizer)
        self._dtype = np.uint16 if self._vocab_size <= 2**16 else np.uint32
        row = sequence_length + 1
        self._packers: dict[Split, Packer] = {"train": Packer(row), "validation": Packer(row)}
        self._shards: dict[Split, list[Shard]] = {"train": [], "validation": []}

    def add(self, block: pa.Table) -> None:
        """Take in documents, one a line: `tokens` (a list), `held_out`, `characters`."""
        documents = block.column("tokens").combine_chunks()
        starts, tokens_N = documents.offsets.to_numpy(), documents.values.to_numpy()
        for number, is_held_out in enumerate(block.column("held_out").to_pylist()):
            split: Split = "validation" if is_held_out else "train"
            self._packers[split].add(tokens_N[starts[number] : starts[number + 1]])
        for split, packer in self._packers.items():
            for rows_NT in packer.rows(self.rows_per_shard):
                self._write(split, rows_NT)
        self.documents += block.num_rows
        self.tokens += int(starts[-1] - starts[0])
        self.characters += sum(block.column("characters").to_pylist())

    def finish(self) -> Manifest:
        """Write the rows that are left, the tokenizer and the manifest."""
        for split, packer in self._packers.items():
            rest_NT = packer.rest()
            if len(rest_NT):
                self._write(split, rest_NT)
        self.tokenizer.save(str(self.folder / TOKENIZER))
        manifest = Manifest(
            sequence_length=self.sequence_length,
            vocab_size=self._vocab_size,
            tokenizer_sha256=hashlib.sha256((self.folder / TOKENIZER).read_bytes()).hexdigest(),
            documents=self.documents,
            characters=self.characters,
            tokens=self.tokens,
            train=tuple(self._shards["train"]),
            validation=tuple(self._shards["validation"]),
        )
        manifest.write(self.folder)
        return manifest

    def _write(self, split: Split, rows_NT: NDArray[np.integer]) -> None:
        path = self.folder / f"{split}-{len(self._shards[split]):05}.arrow"
        self._shards[split].append(write_shard(path, rows_NT.astype(self._dtype)))
