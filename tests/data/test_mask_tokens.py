"""Masks: as many as wanted, anywhere as likely, and a function of the address alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tokendrop.data.read.mask_tokens import IGNORED, choose_masked, mask_tokens

SHARE = st.floats(0.01, 1.0)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is maskable (at least one token in each sequence), where words begin, keys."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    maskable = draw(hnp.arrays(bool, shape))
    maskable[:, draw(st.integers(0, shape[1] - 1))] = True
    keys = draw(hnp.arrays(np.int64, shape[0], elements=st.integers(-(2**63), 2**63 - 1)))
    return maskable, draw(hnp.arrays(bool, shape)), keys


def wanted(maskable: np.ndarray, share: float, most: int | None) -> list[int]:
    return [min(most or 10**9, max(1, round(share * int(count)))) for count in maskable.sum(1)]


@given(case=sequences(), share=SHARE, most=st.none() | st.integers(1, 8))
def test_single_tokens_are_exactly_as_many_as_wanted_and_none_that_may_not_be(case, share, most):
    maskable, _, keys = case
    masked = choose_masked(maskable, None, share=share, most=most, keys_B=keys)
    assert masked.sum(1).tolist() == wanted(maskable, share, most)
    assert not (masked & ~maskable).any()


@given(case=sequences(), share=SHARE, most=st.none() | st.integers(1, 8))
def test_words_are_taken_whole_while_one_more_fits(case, share, most):
    maskable, begins, keys = case
    masked = choose_masked(maskable, begins, share=share, most=most, keys_B=keys)
    single = choose_masked(maskable, None, share=share, most=most, keys_B=keys)
    for row, most_here in enumerate(wanted(maskable, share, most)):
        words: list[list[int]] = []
        for place in np.flatnonzero(maskable[row]):
            if begins[row, place] or place == 0 or not maskable[row, place - 1]:
                words.append([])
            words[-1].append(place)
        if min(map(len, words)) > most_here:
            assert masked[row].tolist() == single[row].tolist()
            continue
        taken = [word for word in words if masked[row, word[0]]]
        left = most_here - sum(map(len, taken))
        assert sorted(place for word in taken for place in word) == np.flatnonzero(masked[row]).tolist()
        assert left >= 0
        assert all(len(word) > left for word in words if word not in taken)


@given(case=sequences(), is_whole=st.booleans(), data=st.data())
def test_a_mask_is_the_same_beside_whatever_other_sequences(case, is_whole, data):
    maskable, begins, keys = case
    together = choose_masked(maskable, begins if is_whole else None, share=0.3, most=None, keys_B=keys)
    for row in data.draw(st.permutations(range(len(keys)))):
        one = slice(row, row + 1)
        alone = choose_masked(maskable[one], begins[one] if is_whole else None, share=0.3, most=None, keys_B=keys[one])
        assert np.array_equal(alone[0], together[row])


def test_any_position_and_any_two_are_masked_as_often_as_others():
    count, length = 40_000, 20
    maskable = np.tile(np.arange(length) % 5 != 0, (count, 1))
    for words in (None, np.ones_like(maskable)):
        masked = choose_masked(maskable, words, share=0.25, most=None, keys_B=np.arange(count))[:, maskable[0]]
        places = masked.shape[1]  # 4 of 16 are masked
        expected = count * 4 / places
        chi_squared = ((masked.sum(0) - expected) ** 2 / expected).sum() / (1 - 4 / places) * (places - 1) / places
        assert chi_squared < 37.7  # 15 degrees of freedom, p = 0.001
        both = masked.astype(float).T @ masked.astype(float)
        pairs = both[np.triu_indices(places, 1)]
        assert abs(pairs / (count * 4 * 3 / (16 * 15)) - 1).max() < 0.1


def test_a_key_has_a_mask_of_its_own():
    maskable = np.ones((2000, 64), bool)
    masked = choose_masked(maskable, None, share=0.15, most=None, keys_B=np.arange(2000))
    assert len({row.tobytes() for row in masked}) == 2000


@given(case=sequences(), ids=st.data())
def test_what_is_not_masked_stays_and_what_is_can_be_put_back(case, ids):
    maskable, _, keys = case
    tokens = ids.draw(hnp.arrays(np.int64, maskable.shape, elements=st.integers(5, 99)))
    masked = choose_masked(maskable, None, share=0.5, most=None, keys_B=keys)
    read, labels = mask_tokens(tokens, masked, mask=4, ordinary_N=np.arange(5, 100), keys_B=keys)
    assert ((labels != IGNORED) == masked).all()
    assert np.array_equal(np.where(masked, labels, read), tokens)
    assert read.min() >= 4


def test_eight_of_ten_masked_tokens_read_mask_one_another_token_and_one_itself():
    tokens = np.full((2000, 100), 50)
    masked = np.ones_like(tokens, bool)
    ordinary = np.array([50, *range(60, 159)])
    read, _ = mask_tokens(tokens, masked, mask=4, ordinary_N=ordinary, keys_B=np.arange(2000))
    total, four = tokens.size, 4 * 0.5 / tokens.size**0.5  # standard deviations, at most
    assert abs((read == 4).mean() - 0.8) < four
    assert abs((read == 50).mean() - 0.1 - 0.001) < four
    others = np.array([(read == other).sum() for other in ordinary[1:]])
    assert others.sum() == total - (read == 4).sum() - (read == 50).sum()
    expected = total * 0.1 / 100
    assert ((others - expected) ** 2 / expected).sum() < 149  # 99 degrees of freedom, p = 0.001
