"""Where text comes from and how it becomes rows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Literal

from tokendrop.config.files import is_uri, not_a_folder, shown, unusable_path
from tokendrop.secrets import redact

DataKind = Literal["text", "sentence_pairs", "examples", "images"]
"""What a task reads: documents end to end, pairs of neighbouring runs of sentences, or texts or images with labels."""

HeldOutSplit = Literal["validation", "test"]

_MOST_TOKENS = 1_000_000  # of a vocabulary that is learned here, for which room is taken beforehand
_MOST_BYTES = 2**40  # of a document
_MOST_ROWS = 2**36  # of a source, see data/read/order.py


def is_name(text: str) -> bool:
    """Whether a source may be called so: its name begins those of files."""
    return bool(text) and all(letter.isalnum() or letter in "_." for letter in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One part of a mixture."""

    name: str
    """Names its token shards and its line in tables."""
    corpus: tuple[str, ...]
    """As `data.corpus`."""
    only: tuple[str, ...] = ()
    """As `data.only`."""
    weight: float
    """Its share of the training samples; shares are relative to their sum. A source that is used up begins again."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name: want letters, digits, '_' and '.', got {self.name!r}")
        if len(self.name.encode()) > 200:
            raise ValueError(f"name: want at most 200 bytes, got {len(self.name.encode())}")
        if not self.corpus:
            raise ValueError("corpus: want at least one file, folder, glob or URI")
        if not self.weight > 0:
            raise ValueError(f"want a weight above 0, got {self.weight:g}")


SPECIAL_TOKENS = 3
"""Of a pair of sentences: [CLS] A [SEP] B [SEP]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsConfig:
    """What BERT learns from pairs of sentences; the defaults are what Megatron-LM does."""

    sentence_task: Literal["sop", "nsp", "none"] = "sop"
    """Half of the pairs are made wrong, to be told from the others: by sentence order (SOP) B stands before A, by next
    sentence (NSP) another text stands in B's place. With none, all are right, and the model has no such head."""
    mask_share: float = 0.15
    """Share of the tokens to predict: of these 80% read [MASK], 10% another token, 10% stay."""
    max_predictions: int | None = None
    """Most tokens to predict in one sequence."""
    whole_words: bool = True
    """Choose words with all of their pieces instead of single tokens."""
    short_share: float = 0.1
    """Share of the pairs that are made shorter than they could be, to a random length."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_share <= 1 or not 0 <= self.short_share <= 1:
            raise ValueError(
                f"want 0 < mask_share <= 1 and 0 <= short_share <= 1, got {self.mask_share:g} and {self.short_share:g}"
            )
        if self.max_predictions is not None and self.max_predictions < 1:
            raise ValueError(f"want max_predictions of at least 1, got {self.max_predictions}")

    def most_labels(self, sequence_length: int) -> int:
        """Tokens to predict in one sequence, at most."""
        return min(ceil(self.mask_share * sequence_length), self.max_predictions or sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Where each node keeps token shards of a store, for all workers there."""

    folder: str = "~/.cache/tokendrop/shards"
    """On a disk of the node's own, at best; `~` is the home folder there."""
    max_bytes: int = 100 * 10**9
    """Of shards in that folder; those that were needed longest ago go first."""

    def __post_init__(self) -> None:
        if reason := not_a_folder(self.folder):
            raise ValueError(f"folder: {reason}")
        if not self.folder.startswith(("/", "~")):
            raise ValueError(f"folder: want a path from / or ~ on, the same on each node, got {shown(self.folder)}")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes: want at least 1, got {self.max_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """A corpus, its tokenizer and its held-out parts."""

    corpus: tuple[str, ...] = ()
    """Files, folders or globs of .jsonl, .jsonl.zst, .jsonl.gz, .parquet, .arrow, .tsv and .txt, here or in a store
    (s3://, gs://, hf://, file://); a store's credentials come from the environment. `python` is the text that comes
    with every Python: its documentation topics and its standard library. Images lie in .parquet, .arrow or WebDataset's
    .tar, or in a folder with one folder for each class."""
    only: tuple[str, ...] = ()
    """Names of subsets, such as `Wikipedia (en)`; documents of others are left out. Without names, all are taken."""
    sources: tuple[SourceConfig, ...] = ()
    """In the place of `corpus`: several of them, mixed by weight."""
    text_key: str = "text"
    """The field of a JSON line, or the column of a table, that holds the text; dots reach into fields of fields."""
    subset_key: str = "meta.pile_set_name"
    """The field that names the subset which a document comes from, as the Pile does; it may be missing."""
    max_document_bytes: int = 2**26
    """Longer documents are rejected."""
    max_rejected: float = 1e-4
    """Share of the documents that may be unreadable before preparation stops; each is listed in rejected.parquet.
    A damaged file, of which the rest can't be read, stops it always; 1 goes on whatever is lost."""
    tsv_header: bool = True
    """Whether the first line of a .tsv names its columns; else their names are their numbers, from 0."""
    text_unit: Literal["piece", "line", "stripped_line"] = "piece"
    """What a document of a .txt is: some 16 KB up to a blank line, a line with its end, or one without the white space
    around it."""
    end_of_text: bool = True
    """Put the token that ends a text after each document."""
    validation_corpus: tuple[str, ...] = ()
    """Files as in `corpus` that are held out for validation; with them, all documents of `corpus` are trained on."""
    test_corpus: tuple[str, ...] = ()
    """Files as in `corpus` that are held out for tests."""
    epoch_samples: int | None = None
    """Training samples of an epoch, for lengths in epochs; null for as many as preparation makes of the corpus."""
    tokenizer: str | None = None
    """A `tokenizer.json` or, for BERT, a `vocab.txt`; without one, a tokenizer is trained on the head of the corpus,
    of several sources on the heads of all by weight."""
    tokenizer_vocab_size: int = 4096
    """Size of a tokenizer that is trained here."""
    validation_share: float = 0.01
    """Share of the documents held out for validation, chosen by a hash of their text."""
    test_share: float = 0.0
    """Share of the documents held out for nothing but tests, chosen by the same hash."""
    rows_per_shard: int = 4096
    """Rows of sequence_length + 1 tokens in one training shard; those held out come in shards of a sixteenth."""
    shuffle_rows: int = 2**16
    """In the first epoch rows are shuffled within windows of so many, and training follows preparation at that
    distance; later epochs are shuffled whole. 0 shuffles the first whole too, once all is prepared."""
    pairs: PairsConfig = field(default_factory=PairsConfig)
    """How a model of kind bert reads the corpus."""
    reader: Literal["memory_map", "ray_data"] = "memory_map"
    """How workers read token shards: mapped from the shared folder, or streamed to them by Ray Data."""
    folder: str = "runs/data"
    """Prepared token shards are kept below this folder, one folder a corpus, and used again. Or the URI of one folder
    of them in a store (s3://, gs://), copied there whole: workers read it through `cache`, the corpus is not read."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """On each node, what is read of a `folder` in a store."""

    def __post_init__(self) -> None:
        if bool(self.corpus) == bool(self.sources):
            raise ValueError("want either corpus, with at least one file, folder, glob or URI, or sources")
        self._check_paths()
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: want a name for each, got {', '.join(names)}")
        if self.sources and self.only:
            raise ValueError("only: with sources, say it in each of them")
        if (self.validation_corpus or self.test_corpus) and self.sources:
            raise ValueError("validation_corpus: it goes with corpus, not with sources; test_corpus alike")
        if self.held_out_corpora and self.test_share:
            raise ValueError("test_share: it goes without validation_corpus and test_corpus; want test_corpus instead")
        if not 0 < self.validation_share < 1 or not 0 <= self.test_share < 1 - self.validation_share:
            raise ValueError(
                "want 0 < validation_share < 1 and 0 <= test_share < 1 - validation_share,"
                f" got {self.validation_share:g} and {self.test_share:g}"
            )
        if self.tokenizer_vocab_size < 257:
            raise ValueError(
                f"tokenizer_vocab_size: 256 bytes and the end of text want 257, got {self.tokenizer_vocab_size}"
            )
        for key, value, most in (
            ("tokenizer_vocab_size", self.tokenizer_vocab_size, _MOST_TOKENS),
            ("max_document_bytes", self.max_document_bytes, _MOST_BYTES),
            ("rows_per_shard", self.rows_per_shard, _MOST_ROWS),
            ("shuffle_rows", self.shuffle_rows, _MOST_ROWS),
        ):
            if value > most:
                raise ValueError(f"{key}: want at most {most:,}, got {value:,}")
        if self.rows_per_shard < 1 or self.shuffle_rows < 0 or self.max_document_bytes < 1:
            raise ValueError("want rows_per_shard and max_document_bytes of at least 1, shuffle_rows of at least 0")
        if self.epoch_samples is not None and (self.epoch_samples < 1 or self.sources):
            raise ValueError(f"epoch_samples: want a number of at least 1, of one corpus, got {self.epoch_samples}")
        if not 0 <= self.max_rejected <= 1:
            raise ValueError(f"want 0 <= max_rejected <= 1, got {self.max_rejected:g}")

    def _check_paths(self) -> None:
        if self.tokenizer is not None and (reason := not_a_folder(self.tokenizer)):
            raise ValueError(f"tokenizer: {reason}")
        if reason := unusable_path(self.folder):
            raise ValueError(f"folder: {reason}")
        if not self.is_stored:
            return
        if redact(self.folder) != self.folder:
            raise ValueError(f"folder: want credentials in the environment of the nodes, got {shown(self.folder)}")
        if self.reader != "memory_map":
            raise ValueError(
                f"reader: '{self.reader}' reads from a folder, not from {shown(self.folder)}; want memory_map, with"
                " which each node reads a store through its cache"
            )

    @property
    def is_stored(self) -> bool:
        """Whether `folder` lies in a store, and is only read."""
        return is_uri(self.folder)

    @property
    def held_out_corpora(self) -> dict[HeldOutSplit, tuple[str, ...]]:
        """Files of their own that are held out, by split."""
        found: dict[HeldOutSplit, tuple[str, ...]] = {"validation": self.validation_corpus, "test": self.test_corpus}
        return {split: corpus for split, corpus in found.items() if corpus}

    def corpus_key(self, number: int) -> str:
        """The key in a job of the corpus of one source of the mixture, counted from 0."""
        return f"data.sources[{number}].corpus" if self.sources else "data.corpus"

    @property
    def mixture(self) -> tuple[SourceConfig, ...]:
        """The sources; a `corpus` is the only one of its mixture."""
        return self.sources or (SourceConfig(name="corpus", corpus=self.corpus, only=self.only, weight=1.0),)

    def held_out_shares(self, sequences: int) -> tuple[int, ...]:
        """Of so many held-out sequences, those of each source: by weight, the rest to the largest remainders."""
        return _by_weight([source.weight for source in self.mixture], sequences)

    def held_out_counts(self, sequences: int, have: Sequence[int]) -> tuple[int, ...]:
        """Of so many held-out sequences, those of each source, fewer only where all sources together have fewer.

        Each source gives its share; what some are short of, the others give, by their weights.

        Args:
            have: the sequences of each source that were held out.
        """
        counts = [min(pair) for pair in zip(have, self.held_out_shares(sequences), strict=True)]
        while left := min(sequences, sum(have)) - sum(counts):
            more = [number for number, count in enumerate(counts) if count < have[number]]
            shares = _by_weight([self.mixture[number].weight for number in more], left)
            for number, share in zip(more, shares, strict=True):
                counts[number] = min(have[number], counts[number] + share)
        return tuple(counts)


def _by_weight(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """So many in shares by weight, the rest to the largest remainders."""
    exact = [weight / sum(weights) * count for weight in weights]
    counts = [floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: count - sum(counts)]:
        counts[number] += 1
    return tuple(counts)
