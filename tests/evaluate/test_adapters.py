"""One text, one log-likelihood: by our adapter, by lm-eval's own on the exported folder, and as held-out loss.

In float64, where a difference is more than rounding.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokendrop.data.read.row_reader import Rows, held_out_ids
from tokendrop.errors import UserError
from tokendrop.evaluate.export import export_checkpoint
from tokendrop.evaluate.harness import LmEvalAdapter
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.evaluate.load import load_run
from tokendrop.track.run_folder import open_run_folder

NATS = 1e-6  # of one log-likelihood, which is hundreds
WINDOW = 128
WORDS = ["a", "the", "river", "stone", "birds", "Ünïcode", "don't", "数", "🙂", ".", "<|endoftext|>", "\n", "\t", ""]

Adapters = tuple[LmEvalAdapter, HFLM]


def texts(most_words: int) -> st.SearchStrategy[str]:
    """Of any length up to some three tokens a word, and with spaces in a row, in front and at the end."""
    words = st.sampled_from(WORDS)
    return st.one_of(
        st.lists(words, max_size=6).map(" ".join),
        st.tuples(st.lists(words, min_size=1, max_size=6), st.integers(1, most_words)).map(
            lambda drawn: " ".join((drawn[0] * most_words)[: drawn[1]])
        ),
    )


@pytest.fixture(scope="module")
def run(tiny_run: Path, make_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_run`, of a job in float64."""
    return make_run(tmp_path_factory.mktemp("float64"), load_run(tiny_run)[1], precision="fp64")


@pytest.fixture(scope="module")
def adapters(run: Path) -> Adapters:
    """Ours, and lm-eval's own."""
    exported, _ = export_checkpoint(run, run.parent / "exported")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    theirs = HFLM(
        pretrained=model,
        tokenizer=AutoTokenizer.from_pretrained(exported),
        batch_size=3,
        device="cpu",
        logits_cache=False,
    )
    return LmEvalAdapter(*load_run(run, torch.float64)[:2]), theirs


def requests(kind: str, *arguments: tuple[str, ...]) -> list[Instance]:
    return [Instance(kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]  # pyright: ignore[reportArgumentType]


@given(st.lists(st.tuples(texts(200), texts(40)), min_size=1, max_size=5))
@settings(max_examples=60)
def test_both_adapters_find_a_continuation_as_likely_whatever_the_length_of_its_context(
    adapters: Adapters, pairs: list[tuple[str, str]]
) -> None:
    ours, _ = adapters
    scored = [pair for pair in pairs if is_scored(ours, *pair)]

    found, expected = (one.loglikelihood(requests("loglikelihood", *scored), disable_tqdm=True) for one in adapters)

    for (logprob, is_greedy), (their_logprob, theirs_is_greedy) in zip(found, expected, strict=True):
        assert abs(logprob - their_logprob) <= NATS
        assert is_greedy == theirs_is_greedy


def is_scored(adapter: LmEvalAdapter, context: str, continuation: str) -> bool:
    """Whether there is a token to score, after one at least, and no more than the window takes."""
    if context:
        before, tokens = adapter._encode_pair(context, continuation)
    else:
        tokens = adapter.tok_encode(continuation)
        before, tokens = [adapter.eot_token_id], tokens[tokens[:1] == [adapter.eot_token_id] :]
    return len(before) > 0 and 0 < len(tokens) <= WINDOW


@given(st.lists(texts(200), min_size=1, max_size=3))
@settings(max_examples=60)
def test_both_adapters_find_a_text_as_likely_however_many_windows_it_takes(
    adapters: Adapters, texts: list[str]
) -> None:
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))

    found, expected = (one.loglikelihood_rolling(asked, disable_tqdm=True) for one in adapters)

    for text, ours, theirs in zip(texts, found, expected, strict=True):
        assert abs(ours - theirs) <= NATS
        assert ours < 0 or text == ""


def test_lm_evals_logits_cache_is_wrong_where_two_windows_of_a_text_differ_in_what_they_score_alone(
    adapters: Adapters,
) -> None:
    """On by default, it gives both the sums of the first tokens of the longer one; of lm-eval 0.4.13."""
    _, theirs = adapters
    cached = HFLM(pretrained=theirs.model, tokenizer=theirs.tokenizer, batch_size=3, device="cpu")
    asked = requests("loglikelihood_rolling", (" ".join(WORDS * 40),), (" ".join(["birds"] * 129),))

    (plain, periodic), (ours, of_cache) = ([*one.loglikelihood_rolling(asked)] for one in (theirs, cached))

    assert abs(plain - ours) <= NATS
    assert abs(periodic - of_cache) > 1


@pytest.mark.parametrize(
    ("context", "continuation"), [("a gre", ""), ("the", " 数" * WINDOW), ("", "<|endoftext|>"), ("\n", "a")]
)
def test_what_lm_evals_adapter_asserts_ours_says_in_a_sentence(
    adapters: Adapters, context: str, continuation: str
) -> None:
    ours, theirs = adapters
    assert not is_scored(ours, context, continuation)
    asked = requests("loglikelihood", (context, continuation))

    with pytest.raises(UserError, match=r"^task: want .*, found"):
        ours.loglikelihood(asked, disable_tqdm=True)
    with pytest.raises(AssertionError):
        theirs.loglikelihood(asked, disable_tqdm=True)


def test_held_out_loss_is_what_the_adapters_find_of_each_row_after_its_first_token(
    run: Path, adapters: Adapters
) -> None:
    """A rolling log-likelihood has one term more: of the first token, after the end of a text."""
    result = held_out_figures(run)
    config, data = open_run_folder(run)
    rows = Rows(data, "validation")
    ids = held_out_ids(config.data, rows.committed, config.evaluate.sequences)
    asked = [(("", ""), row[:1], row[1:]) for row in rows.read(ids).tolist()]

    for adapter in adapters:
        scores = adapter._loglikelihood_tokens(asked, disable_tqdm=True)
        assert len(scores) == result["rows"] > 1
        of_a_row = sum(logprob for logprob, _ in scores) / len(scores)
        assert abs(of_a_row + result["val_loss"] * WINDOW) <= NATS
