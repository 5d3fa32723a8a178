"""Where text comes from and how it becomes rows of tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """A corpus, its tokenizer and its held-out part."""

    corpus: tuple[str, ...]
    """Files, folders or globs of .jsonl, .jsonl.zst, .jsonl.gz, .parquet and .txt, here or in a store (s3://, gs://,
    file://); a store's credentials come from the environment. `python` is the text that comes with every Python:
    its documentation topics and its standard library."""
    text_key: str = "text"
    """The field of a JSON line, or the column of a Parquet file, that holds the text."""
    tokenizer: str | None = None
    """A `tokenizer.json`; without one, a byte-level BPE is trained on the head of the corpus."""
    tokenizer_vocab_size: int = 4096
    """Size of a tokenizer that is trained here."""
    validation_share: float = 0.01
    """Share of the documents held out, chosen by a hash of their text."""
    rows_per_shard: int = 4096
    """Rows of sequence_length + 1 tokens in one token shard."""
    reader: Literal["memory_map", "ray_data"] = "memory_map"
    """How workers read token shards: mapped from the shared folder, or streamed to them by Ray Data."""
    folder: str = "runs/data"
    """Prepared token shards are kept below this folder, one folder a corpus, and used again."""

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ValueError("corpus: want at least one file, folder, glob or URI")
        if not 0 < self.validation_share < 1:
            raise ValueError(f"want 0 < validation_share < 1, got {self.validation_share}")
        if self.tokenizer_vocab_size < 257:
            raise ValueError(
                f"tokenizer_vocab_size: 256 bytes and the end of text want 257, got {self.tokenizer_vocab_size}"
            )
        if self.rows_per_shard < 1:
            raise ValueError(f"want rows_per_shard of at least 1, got {self.rows_per_shard}")
