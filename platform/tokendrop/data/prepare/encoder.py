"""Texts to token ids, by the fastest library that gives the tokenizer's own ids."""

import json
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from tokendrop.data.tokenizer import vocab_size

# tiktoken's spelling of GPT-2's pattern, which is that of the ByteLevel pre-tokenizer
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Encoder:
    """Encodes texts one by one.

    Special tokens that a text spells out are text: `<|endoftext|>` in a web page ends no document.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = vocab_size(tokenizer)
        self._tokenizer, self._fast = tokenizer, as_tiktoken(tokenizer)
        tokenizer.encode_special_tokens = True

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of each text, one array a text."""
        if self._fast is not None:
            return [self._fast.encode_to_numpy(text, disallowed_special=()) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


@cache
def build_encoder(model: str) -> Encoder:
    """The encoder of a tokenizer, given as the text of its tokenizer.json; built once in a process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has booked one core; Ray fills the others
    return Encoder(Tokenizer.from_str(model))


def as_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding | None:
    """The same byte-level BPE for tiktoken, some three times as fast; None where ids could differ.

    tiktoken merges two neighbours whenever the vocabulary has their sum, the merge with the lowest id first; Hugging
    Face applies a list of merges in its order. Both come to the same where ids rise with that list and every token
    is what its own text merges to: then a neighbour's merge that the list lacks would have been that token already.
    """
    tree = json.loads(tokenizer.to_str())
    if not _is_byte_level_bpe(tree):
        return None
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    merged = [vocabulary["".join(pair)] for pair in tree["model"]["merges"]]
    if merged != sorted(merged):
        return None
    special = {token["content"]: token["id"] for token in tree["added_tokens"]}
    of_letter = _bytes_by_letter()
    ranks: dict[bytes, int] = {}
    for token, number in vocabulary.items():
        if token in special:
            continue
        if [one.id for one in tokenizer.model.tokenize(token)] != [number]:
            return None
        ranks[bytes(of_letter[letter] for letter in token)] = number
    if not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    return tiktoken.Encoding("tokendrop", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def _is_byte_level_bpe(tree: dict[str, Any]) -> bool:
    model, before = tree["model"], tree["pre_tokenizer"] or {}
    plain = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        model["type"] == "BPE"
        and not any(model.get(key) for key in plain)
        and tree["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space")
        and before.get("use_regex", True)
        and all(token["special"] for token in tree["added_tokens"])
    )


def _bytes_by_letter() -> dict[str, int]:
    """GPT-2's printable letter for each byte, the other way round."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
