"""A small WordPiece, texts of sentences, and folders of pair rows without Ray."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tokendrop.config.data import DataKind
from tokendrop.data.prepare.encoder import Encoder
from tokendrop.data.prepare.pack import Documents, Packer
from tokendrop.data.prepare.pair_rows import PairPacker
from tokendrop.data.prepare.sentences import split_sentences
from tokendrop.data.read.pair_runs import pair_row_length
from tokendrop.data.shards.format import FORMAT, SPLITS, TOKENIZER, Header, Shard, append_shard, write_shard
from tokendrop.data.tokenizer import PAIR_TOKENS, load_tokenizer, vocab_size

LENGTH = 32
PIECES = ["a", "b", "c", "d", "e", "##a", "##b", "##c", "##d", "##e", "##ab", "##cd", "."]
NUMBERS = [f"n{number}" for number in range(400)]  # whole words, so that most texts have a token of their own


def write_vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join([*PAIR_TOKENS, *PIECES, *NUMBERS]) + "\n")
    return path


def text(seed: int, *, sentences: int) -> str:
    """Sentences of words of one to six pieces."""
    chance = random.Random(seed)

    def word() -> str:
        return (
            chance.choice(NUMBERS)
            if chance.random() < 0.3
            else "".join(chance.choices("abcde", k=chance.randint(1, 6)))
        )

    return " ".join(" ".join(word() for _ in range(chance.randint(1, 8))).capitalize() + "." for _ in range(sentences))


def texts(count: int, *, seed: int = 0) -> list[str]:
    return [text(1000 * seed + number, sentences=1 + number % 23) for number in range(count)]


def as_documents(lengths: Sequence[Sequence[int]], tokens: np.ndarray | None = None) -> Documents:
    """Documents by the lengths of their sentences; without tokens these are numbered through."""
    count = len(lengths)
    flat = np.array([length for document in lengths for length in document], np.int64)
    return Documents(
        tokens_N=np.arange(flat.sum(), dtype=np.uint16) if tokens is None else tokens,
        lengths_D=np.array([sum(document) for document in lengths], np.int64),
        subsets_D=["even" if number % 2 == 0 else "odd" for number in range(count)],
        files_D=np.arange(count) // 5,
        records_D=1 + np.arange(count) % 5,
        seen_D=np.arange(count),
        bytes_D=np.arange(count) + 100,
        sentences_N=flat,
    )


def write_pairs(folder: Path, corpus: Sequence[str], *, shards: int = 4, complete: bool = True) -> Tokenizer:
    """All rows of a corpus as training rows, in shards of one size, and the same again as validation rows."""
    tokenizer = write_tokenizer(folder)
    packer = PairPacker(LENGTH, short_share=0.1)
    encoded = [Encoder(tokenizer)(split_sentences(one)) for one in corpus]
    tokens = np.concatenate([ids for sentences in encoded for ids in sentences]).astype(np.uint16)
    packer.add(as_documents([[len(ids) for ids in sentences] for sentences in encoded], tokens))
    sizes = {"row_length": pair_row_length(LENGTH), "documents": len(corpus)}
    write_shards(folder, packer, tokenizer, kind="sentence_pairs", **sizes, shards=shards, complete=complete)
    return tokenizer


def write_tokenizer(folder: Path) -> Tokenizer:
    """The small WordPiece, in a folder that is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(write_vocabulary(folder), "sentence_pairs")
    tokenizer.save(str(folder / TOKENIZER))
    return tokenizer


def write_shards(
    folder: Path,
    packer: Packer | PairPacker,
    tokenizer: Tokenizer,
    *,
    kind: DataKind,
    row_length: int,
    documents: int,
    shards: int = 4,
    complete: bool = True,
) -> None:
    """What a packer holds, as training rows and the same again as validation rows, with their manifest.

    Rows of images say which of the two they are.
    """
    size = packer.rows_ready() // shards
    for number in range(shards):
        packed = packer.take(size)
        for split in ("train", "validation"):
            if kind == "images":
                packed.rows_NT[:, 0] = SPLITS.index(split)
            path = folder / f"corpus-{split}-{number:05}.arrow"
            length, digest = write_shard(path, packed.rows_NT, packed.documents, packed.contents)
            append_shard(
                folder,
                Shard(
                    source="corpus",
                    split=split,
                    file=path.name,
                    rows=size,
                    bytes=length,
                    sha256=digest,
                    subsets=packed.subsets,
                    next=packed.next,
                ),
            )
    Header(
        format=FORMAT,
        kind=kind,
        sequence_length=LENGTH,
        row_length=row_length,
        vocab_size=vocab_size(tokenizer),
        tokenizer_sha256=hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest(),
        sources=("corpus",),
        files=tuple(str(number) for number in range(-(-documents // 5))),
        is_complete=complete,
        rows=(size * shards, size * shards, 0) if complete else (),
    ).write(folder)
