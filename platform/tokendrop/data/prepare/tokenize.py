"""Blocks of records into the tokens of each, by a tokenizer."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokendrop.config.data import DataConfig, DataKind
from tokendrop.data.prepare.encoder import Encoder, build_encoder
from tokendrop.data.prepare.examples import ExampleForm, example_rows
from tokendrop.data.prepare.sentences import split_sentences
from tokendrop.data.shards.format import SPLITS
from tokendrop.data.tokenizer import end_of_text, token_type

Shares = tuple[float, float]
"""Of the documents, those held out for validation and for tests."""


def build_tokenize(
    data: DataConfig, tokenizer: Tokenizer, kind: DataKind, examples: ExampleForm | None = None
) -> Callable[[pa.Table], pa.Table]:
    """What gives the records of a block their tokens, and the split that each goes to."""
    end = (end_of_text(tokenizer),) if kind == "text" and data.end_of_text else ()
    encode = partial(_encode, tokenizer=tokenizer.to_str(), kind=kind, end=end, examples=examples)
    return partial(_tokenize, encode=encode, shares=(data.validation_share, data.test_share))


class _Encoded(NamedTuple):
    """What texts became, one by one."""

    ids: list[NDArray[np.uint32]]
    dtype: type
    sentences: list[NDArray[np.int64]] | None = None
    reasons: Sequence[str] = ()
    """Why each text is none, where it is none; of none of them when left out."""


def _encode(
    texts: list[str], *, tokenizer: str, kind: DataKind, end: tuple[int, ...], examples: ExampleForm | None
) -> _Encoded:
    """Texts become their tokens, with what ends a text; or with the lengths of their sentences; examples their rows."""
    encoder = build_encoder(tokenizer)
    dtype = token_type(encoder.vocab_size)
    if examples is not None:
        rows, reasons = example_rows(tokenizer, texts, examples)
        return _Encoded(rows, dtype, reasons=reasons)
    if kind == "text":
        return _Encoded(_ended(encoder, texts, end), dtype)
    ids, sentences = _by_sentence(encoder, texts)
    return _Encoded(ids, dtype, sentences)


def _tokenize(block: pa.Table, *, encode: Callable[[list[str]], _Encoded], shares: Shares) -> pa.Table:
    texts: list[str] = block.column("text").to_pylist()
    errors, reasons = block.column("error"), block.column("reason").to_pylist()
    try:
        ids, dtype, sentences, found = encode(texts)
        reasons = [*map(max, zip(reasons, found or reasons, strict=True))]  # "" is the least
    except Exception:  # the libraries raise bare Exception
        ids, dtype, sentences, found = _one_by_one(texts, encode)
        failed = [bool(reason) for text, reason in zip(texts, found, strict=True) if text]
        if len(failed) > 1 and all(failed):
            errors = pa.array([*map(max, zip(errors.to_pylist(), found, strict=True))], pa.string())
        reasons = [*map(max, zip(reasons, found, strict=True))]
    encoded, splits = [text.encode() for text in texts], block.column("split").to_pylist()
    return pa.table(
        {
            "tokens": as_lists(ids, dtype),
            "sentences": as_lists(sentences or [np.empty(0)] * len(texts), np.int64),
            "split": pa.array(
                [SPLITS.index(split or split_of(text, shares)) for text, split in zip(encoded, splits, strict=True)],
                pa.int8(),
            ),
            "bytes": pa.array([len(text) for text in encoded], pa.int64()),
            "error": errors,
            "reason": pa.array(reasons, pa.string()),
            **{name: block.column(name) for name in ("file", "record", "subset")},
        }
    )


def _one_by_one(texts: list[str], encode: Callable[[list[str]], _Encoded]) -> _Encoded:
    """Each text on its own; one that the tokenizer can't take has no tokens, and the reason."""
    ids, sentences, reasons, dtype = list[NDArray[np.uint32]](), list[NDArray[np.int64]](), list[str](), np.uint32
    for text in texts:
        try:
            one = encode([text])
        except Exception as error:
            ids.append(np.empty(0, np.uint32))
            sentences.append(np.empty(0, np.int64))
            reasons.append(f"data.tokenizer: it can't take this corpus ({' '.join(str(error).split())})")
            continue
        dtype = one.dtype
        ids += one.ids
        sentences += one.sentences or [np.empty(0, np.int64)]
        reasons += one.reasons or ("",)
    return _Encoded(ids, dtype, sentences, reasons)


def _ended(encoder: Encoder, texts: list[str], end: tuple[int, ...]) -> list[NDArray[np.uint32]]:
    """The tokens of each text and what ends it; an empty text has none."""
    return [np.append(ids, np.array(end, np.uint32)) if len(ids) else ids for ids in encoder(texts)]


def _by_sentence(encoder: Encoder, texts: list[str]) -> tuple[list[NDArray[np.uint32]], list[NDArray[np.int64]]]:
    """The tokens of each text, and how many of them each of its sentences has."""
    split = [split_sentences(text) for text in texts]
    tokens = encoder([sentence for sentences in split for sentence in sentences])
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    firsts = np.cumsum([0, *map(len, split)])
    here = [slice(start, stop) for start, stop in pairwise(firsts)]
    nothing = np.empty(0, np.uint32)
    return [np.concatenate([nothing, *tokens[some]]) for some in here], [lengths[some] for some in here]


def as_lists(values: Sequence[NDArray[Any]], dtype: type) -> pa.ListArray:
    """A column with a list for each of the arrays."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([np.empty(0), *values]).astype(dtype)))


def split_of(content: bytes, shares: Shares) -> str:
    """By a hash of the document, so that equal documents are never on two sides, and larger shares only add."""
    validation, test = shares
    place = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
    return "validation" if place < validation else "test" if place >= 1 - test else "train"
