"""Rows of texts that begin alike, and scores by them against the model applied to one text at a time."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrop.evaluate.branches import common, joined
from tokendrop.evaluate.load import load_run
from tokendrop.evaluate.scoring import score_continuations
from tokendrop.models.gpt import Gpt

LENGTH = 128

token = st.integers(0, 3)
texts = st.lists(token, min_size=1, max_size=4).map(tuple)
documents = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=40).map(tuple), st.lists(texts, min_size=1, max_size=4)), max_size=6
)


@given(documents, st.integers(1, 100))
def test_rows_hold_each_text_once_whole_and_at_its_own_positions(documents, longest):
    every = {beginning + end for beginning, ends in documents for end in ends}

    rows = joined(every, longest)

    assert sorted(text for row in rows for text in row.texts) == sorted(every)
    for row in rows:
        assert len(row) == len(row.tokens) == len(row.positions) == len(row.branches)
        assert len(row.texts) == 1 or len(row) <= longest
        for number, text in enumerate(row.texts):
            places = row.last(number, len(text))
            assert tuple(row.tokens[place] for place in places) == text
            assert [row.positions[place] for place in places] == [*range(len(text))]
            assert {row.branches[place] for place in places} <= {0, number + 1}
            assert row.last(number, 1) == places[-1:]


@given(st.lists(texts, unique=True, max_size=8), st.integers(1, 100))
def test_rows_never_have_more_tokens_than_their_texts(texts, longest):
    assert sum(map(len, joined(texts, longest))) <= sum(map(len, texts))


def test_choices_of_a_document_share_their_context():
    contexts = [(1,) * 60, (2,) * 50 + (3,), (2,) * 50 + (4,)]
    every = [(*context, 7, choice) for context in contexts for choice in range(4)]

    rows = joined(every, longest=200)

    assert [(len(row.texts), row.shared) for row in rows] == [(4, 61), (8, 50)]
    assert sum(map(len, rows)) < sum(map(len, every)) / 3
    assert common((1, 2, 3), (1, 2)) == 2


@pytest.fixture(scope="module", params=["learned", "rotary"])
def model(request: pytest.FixtureRequest, tiny_run: Path, make_run, tmp_path_factory: pytest.TempPathFactory) -> Gpt:
    changes = {"precision": "fp64", "positions": request.param}
    run = make_run(tmp_path_factory.mktemp(request.param), load_run(tiny_run)[1], **changes)
    return load_run(run, torch.float64)[0]


@given(documents, st.integers(1, 500))
@settings(max_examples=25)
def test_a_score_is_that_of_its_text_alone_whatever_it_shares(model: Gpt, documents, batch_tokens):
    pairs = [(beginning * (number % 3 + 1), end) for number, (beginning, ends) in enumerate(documents) for end in ends]

    scores = score_continuations(model, pairs, lambda _: None, batch_tokens=batch_tokens)

    for (context, continuation), (logprob, is_greedy) in zip(pairs, scores, strict=True):
        row = torch.tensor((context + continuation)[-LENGTH - 1 :])
        with torch.no_grad():
            logprobs_SV = model.logits(row[None, :-1])[0].log_softmax(-1)[-len(continuation) :]
        targets = row[-len(continuation) :]
        assert logprob == pytest.approx(logprobs_SV.gather(1, targets[:, None]).sum().item(), abs=1e-9)
        assert is_greedy == torch.equal(logprobs_SV.argmax(-1), targets)
