"""Rows to what BERT reads: pairs of sentences, one of two tasks on them, masks.

Each choice is a function of the run's seed and the sample id, which carries the epoch: so each epoch makes other pairs
and masks of the same rows, and no rank, batch or earlier reading has a part in it.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tokendrop.config.data import PairsConfig
from tokendrop.data.read.mask_tokens import choose_masked, mask_tokens
from tokendrop.data.read.order import ROW_BITS, SampleOrder, hashed, rows_of
from tokendrop.data.read.pair_runs import Runs, pair_row_length, read_runs
from tokendrop.data.read.row_reader import MappedSamples, Rows
from tokendrop.data.tokenizer import PairVocabulary

_SPLIT, _TASK, _MATE, _MATE_SPLIT, _MASK = range(5)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A and B end to end, before special tokens come between."""

    tokens_BR: NDArray[np.int64]
    first_B: NDArray[np.int64]
    """Tokens of A."""
    second_B: NDArray[np.int64]
    """Tokens of B."""


@dataclass(frozen=True, slots=True)
class PairArrays:
    """What a batch is made of; see `BertBatch`."""

    input_ids_BS: NDArray[np.int64]
    token_types_BS: NDArray[np.int64]
    attention_mask_BS: NDArray[np.bool_]
    labels_BS: NDArray[np.int64]
    sentence_labels_B: NDArray[np.int64]
    special_BS: NDArray[np.bool_]


class PairMaker:
    """Samples of sentence pairs, as they are read, to what a model reads."""

    def __init__(self, config: PairsConfig, vocabulary: PairVocabulary, *, sequence_length: int, seed: int) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.sequence_length, self.seed = sequence_length, seed

    def __call__(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64]) -> PairArrays:
        """
        Args:
            rows_BT: as `with_negative_segments` gives them.
        """
        pairs, labels_B = self.pairs(ids_B, rows_BT)
        ids_BS, types_BS, text_BS, real_BS = arrange(pairs, self.vocabulary, self.sequence_length)
        keys_B = self._bits(_MASK, ids_B).astype(np.int64)
        words_BS = ~self.vocabulary.continues_V[ids_BS] if self.config.whole_words else None
        masked_BS = choose_masked(
            text_BS, words_BS, share=self.config.mask_share, most=self.config.max_predictions, keys_B=keys_B
        )
        read_BS, labels_BS = mask_tokens(
            ids_BS, masked_BS, mask=self.vocabulary.mask, ordinary_N=self.vocabulary.ordinary_N, keys_B=keys_B
        )
        return PairArrays(read_BS, types_BS, real_BS, labels_BS, labels_B, real_BS & ~text_BS)

    def pairs(self, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64]) -> tuple[Pairs, NDArray[np.int64]]:
        """Pairs with the task done, and their labels: 1 where A and B do not follow each other."""
        length = pair_row_length(self.sequence_length)
        runs = read_runs(rows_BT[:, :length], sequence_length=self.sequence_length)
        pairs = split_runs(runs, self._bits(_SPLIT, ids_B))
        if self.config.sentence_task == "none":
            return pairs, np.zeros_like(ids_B)
        wrong_B = self._bits(_TASK, ids_B) >> np.uint64(63) == 1
        if self.config.sentence_task == "sop":
            return swap(pairs, wrong_B), wrong_B.astype(np.int64)
        negative_segments = read_runs(rows_BT[:, length:], sequence_length=self.sequence_length)
        wrong_B &= negative_segments.lengths_B > 0
        bits_B = self._bits(_MATE_SPLIT, ids_B)
        return replace_seconds(pairs, runs, negative_segments, wrong_B, bits_B), wrong_B.astype(np.int64)

    def _bits(self, purpose: int, ids_B: NDArray[np.int64]) -> NDArray[np.uint64]:
        return hashed(self.seed, purpose, ids_B)


class PairSamples(MappedSamples):
    """Training samples of sentence pairs by their positions in the run."""

    def __init__(
        self,
        rows: Rows,
        order: SampleOrder,
        config: PairsConfig,
        *,
        seed: int,
        end: int | None = None,
        together: int = 1,
    ) -> None:
        super().__init__(rows, order, end=end, together=together)
        self.config, self.seed = config, seed

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and their rows, as `with_negative_segments` gives them."""
        ids_B, rows_BT = super().at(positions)
        if self.config.sentence_task != "nsp":
            return ids_B, rows_BT
        counts = self.rows.committed.rows
        return ids_B, with_negative_segments(
            self.rows, ids_B, rows_BT, counts=counts, window=self.order.window, seed=self.seed
        )


def with_negative_segments(
    rows: Rows, ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], *, counts: tuple[int, ...], window: int, seed: int
) -> NDArray[np.int64]:
    """Rows with those that NSP may take its wrong B from beside them, (B, 2 x pair_row_length).

    That is any other row of the source's window of the first epoch, which is at hand whole whenever one of its rows
    is read: so it does not depend on how far preparation is. It may be of the same document, where that is long. Where
    a window has but one row, zeros stand there.

    Args:
        counts: rows of each source to take from.
        window: rows; 0 for one window over all.
    """
    sources_B, rows_B = rows_of(ids_B, sources=len(counts))
    starts_B = rows_B // window * window if window else np.zeros_like(rows_B)
    sizes_B = np.array(counts)[sources_B] - starts_B
    sizes_B = np.minimum(sizes_B, window) if window else sizes_B
    steps_B = 1 + (hashed(seed, _MATE, ids_B) % np.maximum(sizes_B - 1, 1).astype(np.uint64)).astype(np.int64)
    mates_B = starts_B + (rows_B - starts_B + steps_B) % sizes_B
    mates_BT = rows.read(sources_B << ROW_BITS | mates_B)
    mates_BT[mates_B == rows_B] = 0
    return np.concatenate([rows_BT, mates_BT], axis=1)


def held_out_pairs(
    rows: Rows, ids_N: NDArray[np.int64], config: PairsConfig, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Held-out sample ids, the first of each source, and their rows; negative segments are among them."""
    rows_NT = rows.read(ids_N)
    if config.sentence_task != "nsp":
        return ids_N, rows_NT
    sources = len(rows.committed.rows)
    counts = np.bincount(rows_of(ids_N, sources=sources)[0], minlength=sources)
    return ids_N, with_negative_segments(rows, ids_N, rows_NT, counts=tuple(counts.tolist()), window=0, seed=seed)


def split_runs(runs: Runs, bits_B: NDArray[np.uint64]) -> Pairs:
    """Each run in two, where one of its sentences begins, any of them as likely."""
    inner_BR = runs.begins_BR.copy()
    inner_BR[:, 0] = False
    first_B = _pick(inner_BR, bits_B)
    return Pairs(runs.tokens_BR, first_B, runs.lengths_B - first_B)


def swap(pairs: Pairs, swapped_B: NDArray[np.bool_]) -> Pairs:
    """B before A where `swapped_B`."""
    first_B = np.where(swapped_B, pairs.second_B, pairs.first_B)
    second_B = np.where(swapped_B, pairs.first_B, pairs.second_B)
    places_R = np.arange(pairs.tokens_BR.shape[1])
    moved_BR = np.where(
        places_R < first_B[:, None], places_R + second_B[:, None], np.maximum(places_R - first_B[:, None], 0)
    )
    inside_BR = places_R < (first_B + second_B)[:, None]
    moved_BR = np.where(swapped_B[:, None] & inside_BR, moved_BR, places_R)
    return Pairs(np.take_along_axis(pairs.tokens_BR, moved_BR, axis=1), first_B, second_B)


def replace_seconds(
    pairs: Pairs, runs: Runs, others: Runs, replaced_B: NDArray[np.bool_], bits_B: NDArray[np.uint64]
) -> Pairs:
    """Sentences of another run in the place of B where `replaced_B`; B is cut to one length, replaced or not.

    Others begin where one of the other run's B could, rather there where enough are left. B is as long as both have
    tokens, up to the end of a sentence of B in half of the pairs, of the others in the other half. `replaced_B` has no
    part in that: so the lengths of A and B tell nothing of it, nor does how B begins or ends.

    Args:
        runs: those that `pairs` are of; a pair keeps all of its B where the other run is empty.
    """
    room = pairs.tokens_BR.shape[1]
    places_R = np.arange(room)
    inner_BR = others.begins_BR & (places_R > 0)
    enough_BR = inner_BR & (places_R + pairs.second_B[:, None] <= others.lengths_B[:, None])
    earliest_BR = inner_BR & (np.cumsum(inner_BR, 1) == 1)
    start_B = _pick(np.where(enough_BR.any(1, keepdims=True), enough_BR, earliest_BR), bits_B)

    most_B = np.minimum(pairs.second_B, others.lengths_B - start_B)
    ends_B = np.where(
        bits_B >> np.uint64(63) == 1,
        _longest(runs, pairs.first_B, most_B),
        _longest(others, start_B, most_B),
    )
    second_B = np.where(others.lengths_B > 0, np.where(ends_B > 0, ends_B, most_B), pairs.second_B)

    from_B = np.where(places_R < pairs.first_B[:, None], -1, places_R - pairs.first_B[:, None] + start_B[:, None])
    taken_BR = np.take_along_axis(others.tokens_BR, np.clip(from_B, 0, room - 1), axis=1)
    tokens_BR = np.where((from_B >= 0) & replaced_B[:, None], taken_BR, pairs.tokens_BR)
    return Pairs(tokens_BR, pairs.first_B, second_B)


def _longest(runs: Runs, start_B: NDArray[np.int64], most_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens from a start to the last end of a sentence among the next `most_B`; 0 where there is none."""
    places_E = np.arange(runs.tokens_BR.shape[1] + 1)
    ends_BE = np.pad(runs.begins_BR, ((0, 0), (0, 1))) | (places_E == runs.lengths_B[:, None])
    lengths_BE = places_E - start_B[:, None]
    return np.where(ends_BE & (lengths_BE <= most_B[:, None]), lengths_BE, 0).max(1)


def arrange(
    pairs: Pairs, vocabulary: PairVocabulary, sequence_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """[CLS] A [SEP] B [SEP] [PAD]...: tokens, token types, whether it is of A or B, and whether it is no padding."""
    places_S = np.arange(sequence_length)[None]
    first_B1, end_B1 = pairs.first_B[:, None], (pairs.first_B + pairs.second_B)[:, None]
    in_first = (places_S > 0) & (places_S <= first_B1)
    in_second = (places_S > first_B1 + 1) & (places_S <= end_B1 + 1)
    real = places_S <= end_B1 + 2
    source = np.where(in_first, places_S - 1, np.where(in_second, places_S - 2, 0))
    ids = np.where(real, vocabulary.sep, vocabulary.pad)
    ids[:, 0] = vocabulary.cls
    ids = np.where(in_first | in_second, np.take_along_axis(pairs.tokens_BR, source, axis=1), ids)
    types = (real & (places_S > first_B1 + 1)).astype(np.int64)
    return ids, types, in_first | in_second, real


def _pick(allowed_BR: NDArray[np.bool_], bits_B: NDArray[np.uint64]) -> NDArray[np.int64]:
    """One of the places that are allowed, any as likely; 0 where none is."""
    count_B = allowed_BR.sum(1)
    wanted_B = (bits_B % np.maximum(count_B, 1).astype(np.uint64)).astype(np.int64)
    return cast("NDArray[np.int64]", (np.cumsum(allowed_BR, 1) > wanted_B[:, None]).argmax(1))
