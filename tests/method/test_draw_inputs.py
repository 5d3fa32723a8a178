"""What `draw` takes: numbers of Python and of numpy, lists, arrays and tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny import BATCH, TOKENS, gpt
from tokendrop.method import Dropping, attach
from tokendrop.method.draw_inputs import leading, tokens_that_stay

IDS = [71, 72, 73]


def kept(**changes: object) -> torch.Tensor:
    dropping = attach(gpt(), seed=1)
    draw(dropping, **changes)
    return dropping.kept(1)


def draw(dropping: Dropping, **changes: object) -> None:
    usual = {"kept_length": 5, "step": 3, "sample_ids": torch.tensor(IDS), "sequence_length": TOKENS, "always": [0, 2]}
    dropping.draw(**{**usual, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kept_length": np.int64(5), "step": np.int32(3), "sequence_length": np.int64(TOKENS)},
        {"kept_length": torch.tensor(5), "step": torch.tensor(3)},
        {"kept_length": {1: 5, 2: np.int64(7)}},
        {"kept_length": {np.int64(1): 5, np.int64(2): 5}},
        {"sample_ids": IDS},
        {"sample_ids": tuple(IDS)},
        {"sample_ids": range(71, 74)},
        {"sample_ids": np.array(IDS)},
        {"sample_ids": [np.int64(number) for number in IDS]},
        {"sample_ids": torch.tensor(IDS, dtype=torch.int32)},
        {"always": (0, 2)},
        {"always": range(0, 3, 2)},
        {"always": np.array([0, 2])},
        {"always": [np.int64(0), np.int64(2)]},
        {"always": torch.tensor([0, 2])},
        {"always": torch.tensor([0, 2], dtype=torch.uint8)},
        {"always": (torch.arange(TOKENS) % 20 % 2 == 0).logical_and(torch.arange(TOKENS) < 3).expand(BATCH, -1)},
        {"always": np.isin(np.arange(TOKENS), [0, 2])[None].repeat(BATCH, 0)},
        {"device": "cpu"},
    ],
    ids=lambda changes: " ".join(f"{name}={type(value).__name__}" for name, value in changes.items()),
)
def test_equal_numbers_make_equal_draws(changes: dict[str, object]) -> None:
    assert torch.equal(kept(**changes), kept())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kept_length": [4, 6]}, r"kept_length: want a number, or a mapping .*, got \[4, 6\]"),
        ({"kept_length": {1: 4}}, r"kept_length: want one for each of the layers \[1, 2\], got \{1: 4\}"),
        ({"kept_length": {0: 4, 1: 4, 2: 4}}, r"kept_length: want one for each of the layers \[1, 2\]"),
        ({"kept_length": 5.5}, "kept_length: want an integer, got 5.5"),
        ({"kept_length": 0}, "want kept lengths in 1..16"),
        ({"sample_ids": [0.5, 1.0, 2.0]}, "sample_ids: want one integer for each sample, got torch.float32"),
        ({"sample_ids": torch.zeros(BATCH, 2).long()}, "sample_ids: want one integer for each sample"),
        ({"sample_ids": 3}, "sample_ids: want one integer for each sample"),
        ({"step": 1.5}, "step: want an integer, got 1.5"),
        ({"sequence_length": 16.0}, "sequence_length: want an integer, got 16.0"),
        ({"always": [TOKENS]}, r"always: want positions in 0..15, got \[16\]"),
        ({"always": [-1]}, r"always: want positions in 0..15, got \[-1\]"),
        ({"always": torch.zeros(BATCH, TOKENS)}, r"always: want positions, or bool \(3, 16\), got torch.float32"),
        ({"always": torch.zeros(BATCH, 4, dtype=torch.bool)}, r"always: want positions, or bool \(3, 16\)"),
        ({"always": [True, False]}, r"always: want positions, or bool \(3, 16\), got torch.bool"),
    ],
)
def test_what_is_none_of_them_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    dropping = attach(gpt(), seed=1)
    draw(dropping)
    before = dropping.kept(1)
    with pytest.raises(ValueError, match=said):
        draw(dropping, **changes)
    assert torch.equal(dropping.kept(1), before)


@given(st.sets(st.integers(0, TOKENS - 1)))
def test_the_tokens_at_the_begin_that_stay_are_counted(always: set[int]) -> None:
    expected = next(place for place in range(TOKENS + 1) if place not in always)
    assert leading(tokens_that_stay(sorted(always), BATCH, TOKENS)) == expected
