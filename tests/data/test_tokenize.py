"""Blocks of records into tokens, where the tokenizer can't take all of them."""

import pytest
from tokenizers import Tokenizer, models

from tokendrop.config.data import DataConfig
from tokendrop.data.corpus.records import Record
from tokendrop.data.prepare.stages import _block
from tokendrop.data.prepare.tokenize import build_tokenize

FAULT = "data.tokenizer: it can't take this corpus ("


def two_words() -> Tokenizer:
    """It has nothing for other words, and says so."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "of": 1}, unk_token="none"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.mark.parametrize(
    ("texts", "tokens", "ends"),
    [
        (["the", "and", "of", ""], [[0, 2], [], [1, 2], []], False),
        (["and"], [[]], False),  # alone in its block
        (["and", "or", ""], [[], [], []], True),
    ],
)
def test_a_document_that_the_tokenizer_can_not_take_is_rejected_and_a_corpus_of_them_is_refused(
    texts: list[str], tokens: list[list[int]], ends: bool
) -> None:
    data = DataConfig(corpus=("corpus.jsonl",))
    records = [Record(number, text, "", "") for number, text in enumerate(texts, 1)]
    block = build_tokenize(data, two_words(), "text")(_block(7, records, "end of the file"))
    assert block.column("tokens").to_pylist() == [*tokens, []]
    is_taken = [text in ("the", "of", "") for text in texts]
    reasons, errors = block.column("reason").to_pylist(), block.column("error").to_pylist()
    assert [reason.startswith(FAULT) for reason in reasons] == [*(not taken for taken in is_taken), False]
    assert [error.startswith(FAULT) for error in errors] == [*(ends and not taken for taken in is_taken), False]
    assert errors[-1] == "end of the file"
