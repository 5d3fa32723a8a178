"""Byte-level BPE, by Hugging Face's tokenizers."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokendrop.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# A vocabulary is learned from the head of a corpus; more text changes a small one little.
_TRAINING_CHARACTERS = 4_000_000


def train_tokenizer(documents: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE as GPT-2's, learned from the first documents.

    Raises:
        UserError: there is no text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(documents), trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A `tokenizer.json`, without the truncation and padding that some have been saved with.

    Raises:
        UserError: it can't be read, or has no end of text.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"data.tokenizer: can't read {path} ({reason}); want a tokenizer.json") from None
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"data.tokenizer: {path} has no token {END_OF_TEXT}, which is put between documents")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    assert token is not None
    return token


def vocab_size(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: one more than the largest id, for ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _head(documents: Iterator[str]) -> Iterator[str]:
    characters = 0
    for text in documents:
        yield text
        characters += len(text)
        if characters >= _TRAINING_CHARACTERS:
            break
    if characters == 0:
        raise UserError("data.corpus: it holds no text")
