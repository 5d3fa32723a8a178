"""Preparation of small corpora, and what its token shards hold."""

from pathlib import Path

from tokenizers import Tokenizer

from corpora import END_OF_TEXT, tiny_job
from folders import all_tokens
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.shards.format import SPLITS
from tokendrop.data.shards.manifest import read_manifest

ROW = 33


def prepared(
    folder: Path,
    corpus: list[Path | str],
    tokenizer: Path | None = None,
    *,
    progress=lambda documents, tokens: None,
    **data: object,
) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"tokenizer": str(tokenizer)} if tokenizer else {}
    job = tiny_job(folder, corpus, data=given | data, model={"vocab_size": 50304})
    return prepare(load_job(job), progress=progress)


def streams(folder: Path) -> dict[str, list[int]]:
    """All tokens of each split, row by row."""
    manifest = read_manifest(folder)
    return {split: all_tokens(folder, manifest, "corpus", split) for split in SPLITS}


def sides(folder: Path, texts: list[str], tokenizer: Path) -> list[str | None]:
    """On which side each document is; None where it lies in the tail that makes no row.

    Walks through both splits with the tokens of the documents in order, so it also proves that the rows are
    these documents, each with the end of text after it, in order and with nothing between.
    """
    bpe = Tokenizer.from_file(str(tokenizer))
    end = bpe.token_to_id(END_OF_TEXT)
    left = streams(folder)
    places = dict.fromkeys(left, 0)
    found: list[str | None] = []
    tail = 0
    for text in texts:
        tokens = [*bpe.encode(text, add_special_tokens=False).ids, end]
        ahead = {split: left[split][place : place + len(tokens)] for split, place in places.items()}
        side = next(
            (split for split, some in ahead.items() if some and some == tokens[: len(some)]),
            None,
        )
        if side is None:
            tail += len(tokens)
        else:
            places[side] += len(ahead[side])
            tail += len(tokens) - len(ahead[side])
        found.append(side)
    assert places == {split: len(some) for split, some in left.items()}
    assert tail < 2 * ROW
    return found
