"""Byte-level BPE for text and WordPiece for pairs of sentences, by Hugging Face's tokenizers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokendrop.config.data import DataKind
from tokendrop.errors import UserError

END_OF_TEXT = "<|endoftext|>"
PAD, UNKNOWN, CLS, SEP, MASK = PAIR_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# A vocabulary is learned from the head of a corpus; more text changes a small one little.
_TRAINING_CHARACTERS = 4_000_000
_ALPHABET = 1000  # of a WordPiece; words with other letters are unknown


@dataclass(frozen=True, slots=True)
class PairVocabulary:
    """What pairs of sentences are made with."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary_N: NDArray[np.int64]
    """All tokens but the special ones."""
    continues_V: NDArray[np.bool_]
    """Whether a token goes on with a word, as `##ing`."""


def train_tokenizer(documents: Iterator[str], *, vocab_size: int, kind: DataKind = "text") -> Tokenizer:
    """Learned from the first documents: a byte-level BPE as GPT-2's, or a WordPiece as BERT's in lower case.

    Raises:
        UserError: there is no text.
    """
    if kind != "text":
        return _learn_wordpiece([*_head(documents)], vocab_size)
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


def by_weight(sources: Sequence[Iterator[str]], weights: Sequence[float]) -> Iterator[str]:
    """Documents of several sources, each in its own order: those of a source have its share of the characters so far.

    A source that is used up is left out from there on.
    """
    taken = dict.fromkeys(range(len(sources)), 0.0)
    while taken:
        source = min(taken, key=lambda number: (taken[number], number))
        text = next(sources[source], None)
        if text is None:
            del taken[source]
        else:
            taken[source] += len(text) / weights[source]
            yield text


def load_tokenizer(path: str | Path, kind: DataKind = "text") -> Tokenizer:
    """A `tokenizer.json`, without the truncation and padding that some have been saved with, or BERT's `vocab.txt`.

    Raises:
        UserError: it can't be read, or is not what this kind of data is made with.
    """
    is_vocabulary = kind != "text" and str(path).endswith(".txt")
    wanted = "a tokenizer.json" if kind == "text" else "a tokenizer.json or a vocab.txt"
    try:
        if is_vocabulary:
            tokenizer = _as_bert(models.WordPiece.from_file(str(path), unk_token=UNKNOWN))
        else:
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"data.tokenizer: can't read {path} ({reason}); want {wanted}") from None
    _check(tokenizer, path, kind)
    if is_vocabulary:
        tokenizer.add_special_tokens([*PAIR_TOKENS])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def label_vocabulary(labels: Sequence[str]) -> Tokenizer:
    """The names of classes in the place of a tokenizer, for data that has none."""
    return Tokenizer(models.WordLevel({label: number for number, label in enumerate(labels)}, unk_token=UNKNOWN))


def labels_of(vocabulary: Tokenizer) -> list[str]:
    """The names of `label_vocabulary`, in their order."""
    names = vocabulary.get_vocab()
    return sorted(names, key=names.__getitem__)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document."""
    return _id(tokenizer, END_OF_TEXT)


def pair_vocabulary(tokenizer: Tokenizer) -> PairVocabulary:
    """The tokens of a WordPiece that has `PAIR_TOKENS`."""
    vocabulary = tokenizer.get_vocab()
    continues_V = np.zeros(vocab_size(tokenizer), bool)
    prefix = tokenizer.model.continuing_subword_prefix
    continues_V[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = True
    ordinary = sorted(number for token, number in vocabulary.items() if token not in PAIR_TOKENS)
    pad, cls, sep, mask = (_id(tokenizer, token) for token in (PAD, CLS, SEP, MASK))
    return PairVocabulary(pad, cls, sep, mask, np.array(ordinary, np.int64), continues_V)


def pair_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, made to put around texts what BERT reads: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, _id(tokenizer, token)) for token in (CLS, SEP)],
    )
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: one more than the largest id, for ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def token_type(size: int) -> type[np.uint16] | type[np.uint32]:
    """The type in which tokens of a vocabulary are stored."""
    return np.uint16 if size <= 2**16 else np.uint32


def _as_bert(model: models.WordPiece) -> Tokenizer:
    """BERT's way to words: in lower case, without accents, apart at spaces and punctuation."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _learn_wordpiece(texts: list[str], vocab_size: int) -> Tokenizer:
    """The same for the same texts.

    The trainer numbers letters inside words as it comes upon them, in the order of a hash table that is another one
    each time, and what it merges first hangs on that; so it is told of them before, as special tokens.
    """
    learner = _as_bert(models.WordPiece(unk_token=UNKNOWN))
    clean = learner.normalizer.normalize_str
    counts = Counter(letter for text in texts for letter in clean(text) if not letter.isspace())
    letters = sorted(counts, key=lambda letter: (-counts[letter], letter))[: min(_ALPHABET, vocab_size // 4)]
    inside = [one for one in letters if len(learner.pre_tokenizer.pre_tokenize_str(clean(f"a{one}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*PAIR_TOKENS, *(f"##{letter}" for letter in inside)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    tokenizer = _as_bert(models.WordPiece(learner.get_vocab(), unk_token=UNKNOWN))
    tokenizer.add_special_tokens([*PAIR_TOKENS])
    return tokenizer


def _check(tokenizer: Tokenizer, path: str | Path, kind: DataKind) -> None:
    if kind == "images":
        return
    if kind == "text":
        if tokenizer.token_to_id(END_OF_TEXT) is None:
            raise UserError(f"data.tokenizer: {path} has no token {END_OF_TEXT}, which is put between documents")
        return
    if not isinstance(tokenizer.model, models.WordPiece):
        raise UserError(
            f"data.tokenizer: {path} is {type(tokenizer.model).__name__}; a model of kind bert wants WordPiece"
        )
    missing = [token for token in PAIR_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise UserError(f"data.tokenizer: {path} has no token {', '.join(missing)}; want {', '.join(PAIR_TOKENS)}")
    if len(tokenizer.get_vocab()) == len(PAIR_TOKENS):
        raise UserError(f"data.tokenizer: {path} has nothing but special tokens")


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number


def _head(documents: Iterator[str]) -> Iterator[str]:
    characters = 0
    for text in documents:
        yield text
        characters += len(text)
        if characters >= _TRAINING_CHARACTERS:
            break
    if characters == 0:
        raise UserError("data.corpus: it holds no text")
