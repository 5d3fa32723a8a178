"""Scores and greedy text, against the model applied to one row at a time."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokendrop.evaluate.load import load_run
from tokendrop.evaluate.scoring import score_continuations, write_greedily
from tokendrop.models.gpt import Gpt

LENGTH, TOLERANCE = 128, 1e-4

tokens = st.integers(0, 400)
contexts = st.lists(tokens, min_size=1, max_size=LENGTH).map(tuple)
# few distinct tokens, so that inputs meet again
pairs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple) | contexts,
        st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple) | contexts,
    ),
    max_size=8,
)


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> Gpt:
    return load_run(tiny_run)[0]


@settings(max_examples=15)
@given(pairs, st.integers(1, 500))
@example([((1,) * 100, (2,) * 60), ((3,), (2,) * LENGTH), ((1,) * 300, (2,))], 300)
def test_a_score_is_the_sum_of_its_own_rows_log_probabilities(model, pairs, batch_tokens):
    told = []

    scores = score_continuations(model, pairs, told.append, batch_tokens=batch_tokens)

    assert sum(told) == len(scores) == len(pairs)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, scores, strict=True):
        row = torch.tensor((context + continuation)[-LENGTH - 1 :])
        with torch.no_grad():
            logprobs_SV = model.logits(row[None, :-1])[0].log_softmax(-1)[-len(continuation) :]
        targets = row[-len(continuation) :]
        expected = logprobs_SV.gather(1, targets[:, None]).sum().item()
        assert logprob == pytest.approx(expected, abs=TOLERANCE * len(continuation))
        assert is_greedy == torch.equal(logprobs_SV.argmax(-1), targets)


@settings(max_examples=10)
@given(st.lists(st.tuples(contexts, st.integers(1, 6)), max_size=5))
def test_written_text_is_the_likeliest_token_after_token(model, cases):
    contexts = [context[-(LENGTH - limit) :] for context, limit in cases]
    limits = [limit for _, limit in cases]

    written = write_greedily(model, contexts, limits, lambda _, so_far: so_far[-1] % 3 == 0, lambda _: None)

    for context, limit, text in zip(contexts, limits, written, strict=True):
        expected: tuple[int, ...] = ()
        while len(expected) < limit and not (expected and expected[-1] % 3 == 0):
            with torch.no_grad():
                row = torch.tensor([context + expected])
                expected += (int(model.logits(row)[0, -1].argmax()),)
        assert text == expected
