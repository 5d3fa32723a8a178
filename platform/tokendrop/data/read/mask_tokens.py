"""Which tokens a masked language model predicts, and what it reads there instead: functions of an address."""

import numpy as np
from numpy.typing import NDArray

from tokendrop.data.read.order import hashed, uniform

IGNORED = -100
"""The label where nothing is to be predicted."""

_CHOICE, _KIND, _TOKEN = 0, 1, 2


def choose_masked(
    maskable_BS: NDArray[np.bool_],
    words_BS: NDArray[np.bool_] | None,
    *,
    share: float,
    most: int | None,
    keys_B: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """The positions to predict: round(share x maskable tokens) in each sequence, at least one and at most `most`.

    Any tokens are as likely as any others. With words, these are shuffled and taken while they fit, whole, so the
    number can be less; where no word of a sequence fits, it counts as one of single tokens.

    Args:
        words_BS: whether a word begins here; a maskable position after one that is not maskable begins one in any case.
        keys_B: addresses of the choices.
    """
    wanted_B = np.clip(np.rint(share * maskable_BS.sum(1)).astype(np.int64), 1, most)
    bits_BS = hashed(_CHOICE, keys_B[:, None], np.arange(maskable_BS.shape[1]))
    single_BS = (_ranks(bits_BS, maskable_BS) < wanted_B[:, None]) & maskable_BS
    if words_BS is None:
        return single_BS
    after_none_BS = ~np.pad(maskable_BS, ((0, 0), (1, 0)))[:, :-1]
    firsts_BS = maskable_BS & (words_BS | after_none_BS)
    word_BS = np.where(maskable_BS, np.cumsum(firsts_BS, 1) - 1, -1)
    whole_BS = _take_words(word_BS, _ranks(bits_BS, firsts_BS), firsts_BS, wanted_B) & maskable_BS
    return np.where(whole_BS.any(1, keepdims=True), whole_BS, single_BS)


def mask_tokens(
    input_ids_BS: NDArray[np.int64],
    masked_BS: NDArray[np.bool_],
    *,
    mask: int,
    ordinary_N: NDArray[np.int64],
    keys_B: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What is read and what is to be predicted, (B, S) each.

    Of the positions to predict 80% read `mask`, 10% any ordinary token and 10% the token itself.

    Source: Devlin et al. 2019, "BERT", section 3.1.
    """
    places_S = np.arange(input_ids_BS.shape[1])
    kinds_BS = uniform(hashed(_KIND, keys_B[:, None], places_S))
    others_BS = ordinary_N[hashed(_TOKEN, keys_B[:, None], places_S) % np.uint64(len(ordinary_N))]
    instead_BS = np.where(kinds_BS < 0.8, mask, np.where(kinds_BS < 0.9, others_BS, input_ids_BS))
    return np.where(masked_BS, instead_BS, input_ids_BS), np.where(masked_BS, input_ids_BS, IGNORED)


def _ranks(bits_BS: NDArray[np.uint64], here_BS: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The place of each position in the order of its bits, those that are `here` first."""
    order_BS = np.lexsort((bits_BS, ~here_BS), axis=1)
    ranks_BS = np.empty_like(order_BS)
    np.put_along_axis(ranks_BS, order_BS, np.arange(bits_BS.shape[1])[None], axis=1)
    return ranks_BS


def _take_words(
    word_BS: NDArray[np.int64], ranks_BS: NDArray[np.int64], firsts_BS: NDArray[np.bool_], wanted_B: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Positions of the words that are taken: by rank, each that still fits."""
    batch, length = word_BS.shape
    rows_B, words_in_B = np.arange(batch), firsts_BS.sum(1)
    sizes_BW, word_of_rank_BW = np.zeros((2, batch, length), np.int64)
    of_B, at_S = np.nonzero(word_BS >= 0)
    np.add.at(sizes_BW, (of_B, word_BS[of_B, at_S]), 1)
    of_B, at_S = np.nonzero(firsts_BS)
    word_of_rank_BW[of_B, ranks_BS[of_B, at_S]] = word_BS[of_B, at_S]
    taken_BW = np.zeros((batch, length), bool)
    left_B = wanted_B.copy()
    for rank in range(int(words_in_B.max(initial=0))):
        words_B = word_of_rank_BW[:, rank]
        fits_B = (sizes_BW[rows_B, words_B] <= left_B) & (rank < words_in_B)
        taken_BW[rows_B[fits_B], words_B[fits_B]] = True
        left_B -= np.where(fits_B, sizes_BW[rows_B, words_B], 0)
        if not left_B.any():
            break
    return np.take_along_axis(taken_BW, np.maximum(word_BS, 0), axis=1)
