"""Corpus -> token shards: list, stream through Ray Data, commit; once for a corpus, from where it stopped."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

from tokendrop.atomic import atomic_write, exclusive_lock
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.corpus.image_records import classes_of, list_images
from tokendrop.data.corpus.records import RecordForm, read_records
from tokendrop.data.corpus.sources import SourceFile, list_files
from tokendrop.data.prepare.fits import (
    check_fits,
    check_form,
    check_vocabulary,
    examples_of,
    row_length_of,
    sequence_length_of,
)
from tokendrop.data.prepare.stages import Work, tokenized
from tokendrop.data.prepare.stored import stored_shards
from tokendrop.data.prepare.tokenize import build_tokenize
from tokendrop.data.prepare.writer import ShardWriter
from tokendrop.data.read.row_reader import FAILED, note_failure
from tokendrop.data.shards.files import check_files
from tokendrop.data.shards.format import FORMAT, MANIFEST, TOKENIZER, Header
from tokendrop.data.shards.manifest import Manifest, read_header, read_manifest
from tokendrop.data.tokenizer import (
    by_weight,
    label_vocabulary,
    labels_of,
    load_tokenizer,
    train_tokenizer,
    vocab_size,
)
from tokendrop.errors import UserError, cause_of

_OF_IMAGES = ("PIL", "torchvision")
_READ_IN_VAIN = 100_000  # documents of which none can be read, before there is a tokenizer

NOT_TO_THE_END = "not prepared to the end"

Progress = Callable[[int, int], None]


class StoppedError(Exception):
    """Raised by `Progress`, to end a preparation that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a job's token shards are made of."""

    files: tuple[SourceFile, ...]
    sources: tuple[str, ...]
    """The source of each file."""
    splits: tuple[str, ...]
    """That of each file's documents; empty where each goes by its hash."""
    folder: Path
    """Where the shards are or will be; its name stands for all that decides what they hold."""


def find_corpus(config: ExperimentConfig) -> Corpus:
    """List a job's files.

    Files that are held out come first, for training waits for them. Those of several sources take turns, so that all
    sources are at hand early; each keeps its own order.

    Raises:
        UserError: a source has no files, they can't be listed, or one is both held out and trained on.
    """
    data, shards = config.data, Path(config.data.folder).absolute()
    if config.task.reads == "images" and (missing := [one for one in _OF_IMAGES if find_spec(one) is None]):
        raise UserError(f"task.kind: '{config.task.kind}' wants {missing[0]}; pip install 'tokendrop[vision]'")
    list_all = list_images if config.task.reads == "images" else list_files
    if data.tokenizer:
        load_tokenizer(data.tokenizer, config.task.reads)
    found: list[tuple[float, int, str, SourceFile, str]] = []
    split = "train" if data.validation_corpus else ""
    for number, source in enumerate(data.mixture):
        files = list_all(source.corpus, cache=shards, key=data.corpus_key(number))
        found += [((place + 0.5) / len(files), number, source.name, file, split) for place, file in enumerate(files)]
    found.sort(key=lambda one: one[:2])
    for split, corpus in reversed(data.held_out_corpora.items()):
        files = list_all(corpus, cache=shards, key=f"data.{split}_corpus")
        others = {one[3].resolved for one in found}
        if twice := [file.name for file in files if file.resolved in others]:
            raise UserError(f"data.{split}_corpus: {min(twice)} is in another part of the corpus too; want it in one")
        found = [(0.0, 0, data.mixture[0].name, file, split) for file in files] + found
    sources, files, splits = (
        tuple(one[2] for one in found),
        tuple(one[3] for one in found),
        tuple(one[4] for one in found),
    )
    return Corpus(files, sources, splits, shards / _fingerprint(config, files, sources, splits))


def prepare(
    config: ExperimentConfig,
    *,
    corpus: Corpus | None = None,
    progress: Progress = lambda documents, tokens: None,
) -> Path:
    """The folder of a job's token shards, made or finished when it is not whole yet. Needs a running Ray.

    Where another process prepares the same, this one waits for it. A `data.folder` in a store is only read.

    Args:
        corpus: what `find_corpus` has found just now; looked for when left out.
        progress: told the documents read and the tokens committed so far.
    Raises:
        UserError: the corpus or the tokenizer is wrong; what is committed stays for the next attempt.
    """
    if stored := stored_shards(config):
        return stored
    corpus = corpus or find_corpus(config)
    folder = corpus.folder
    if (folder / MANIFEST).exists():
        check_form(config, read_header(folder))
    if is_complete(folder):  # they may be on storage that is read-only
        with suppress(OSError):
            (folder / FAILED).unlink(missing_ok=True)
        manifest = read_manifest(folder)
        check_fits(config, manifest)
        check_files(folder, manifest)
        return folder
    tokenizer = _load_or_train(config, corpus)
    check_vocabulary(config, vocab_size(tokenizer))
    with exclusive_lock(folder, while_waiting=lambda: progress(0, 0)):
        (folder / FAILED).unlink(missing_ok=True)
        try:
            if not (folder / MANIFEST).exists():
                _begin(config, corpus, tokenizer)
            manifest = read_manifest(folder) if is_complete(folder) else _write(config, corpus, tokenizer, progress)
            check_fits(config, manifest)
            check_files(folder, manifest)
        except StoppedError:
            raise
        except Exception as error:  # also of a disk, or of Ray; noted under the lock, before another run goes on
            reason = str(error) if isinstance(error, UserError) else f"{folder}: {NOT_TO_THE_END} ({cause_of(error)})"
            note_failure(folder, reason)
            raise
    return folder


def is_complete(folder: Path) -> bool:
    """Whether all of a corpus is in these token shards; raises DamagedDataError where their manifest can't be read."""
    return (folder / MANIFEST).exists() and read_header(folder).is_complete


def _fingerprint(
    config: ExperimentConfig, files: Iterable[SourceFile], sources: Iterable[str], splits: Sequence[str]
) -> str:
    """Names all that decides what the shards hold; a file counts as changed when its size or time is."""
    data = config.data
    parts = [
        FORMAT,
        config.model.kind,
        sequence_length_of(config),
        [(source.name, source.only) for source in data.mixture],
        (data.text_key, data.subset_key, data.max_document_bytes),
        (data.validation_share, data.test_share, data.rows_per_shard, data.pairs.short_share),
        hashlib.sha256(Path(data.tokenizer).read_bytes()).hexdigest() if data.tokenizer else data.tokenizer_vocab_size,
        [(file.name, file.size, file.modified) for file in files],
        [*sources],
    ]
    if any(splits):
        parts.append([*splits])
    if examples := examples_of(config):
        parts.append([config.task.columns, astuple(examples)])
    if config.task.reads == "images":
        parts.append([config.task.columns, getattr(config.task, "labels", ()), config.model.vocab_size])
    if (data.text_unit, data.end_of_text, data.tsv_header) != ("piece", True, True):
        parts.append([data.text_unit, data.end_of_text, data.tsv_header])
    if not data.tokenizer and len(data.mixture) > 1:  # the one that is trained depends on them
        total = sum(source.weight for source in data.mixture)
        parts.append([source.weight / total for source in data.mixture])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _load_or_train(config: ExperimentConfig, corpus: Corpus) -> Tokenizer:
    if config.task.reads == "images":
        return label_vocabulary(_labels(config, corpus))
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer, config.task.reads)
    if (corpus.folder / MANIFEST).exists():
        return load_tokenizer(corpus.folder / TOKENIZER, config.task.reads)
    if config.task.reads == "examples":
        raise UserError("data.tokenizer: want the one of the model that this job begins with (model.init_from)")
    rejected: list[str] = []  # the first one alone: there may be as many as records

    def texts(source: str) -> Iterator[str]:
        lines = zip(corpus.files, corpus.sources, corpus.splits, strict=True)
        read = accepted = 0
        for file in (file for file, of, split in lines if of == source and split in ("", "train")):
            for record in read_records(file, _form(config, source)):
                read += 1
                if not record.reason:
                    accepted += 1
                    yield record.text
                    continue
                if not rejected:
                    rejected.append(f"{file.name}:{record.number}: {record.reason}")
                if read == _READ_IN_VAIN and not accepted:
                    raise UserError(f"data.corpus: of the first {read:,} documents none can be read")

    mixture = config.data.mixture
    sample = by_weight([texts(source.name) for source in mixture], [source.weight for source in mixture])
    try:
        return train_tokenizer(sample, vocab_size=config.data.tokenizer_vocab_size, kind=config.task.reads)
    except UserError as error:
        raise UserError("; ".join([str(error), *rejected[:1]])) from None


def _form(config: ExperimentConfig, source: str) -> RecordForm:
    (one,) = (one for one in config.data.mixture if one.name == source)
    return RecordForm.of(config.data, one, columns=config.task.columns, images=config.task.reads == "images")


def _labels(config: ExperimentConfig, corpus: Corpus) -> list[str]:
    """The classes of images in their order.

    Raises:
        UserError: their number is not the model's.
    """
    classes, given = config.model.vocab_size, getattr(config.task, "labels", ())
    if given:
        return [*given]
    folders = classes_of(corpus.files)
    if not folders:
        return [str(number) for number in range(classes)]
    if len(folders) != classes:
        raise UserError(f"model.classes: this corpus has folders of {len(folders)} classes, the job says {classes}")
    return sorted(folders)


def _begin(config: ExperimentConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    folder, length, kind = corpus.folder, sequence_length_of(config), config.task.reads
    atomic_write(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    header = Header(
        format=FORMAT,
        kind=kind,
        sequence_length=length,
        row_length=row_length_of(config),
        vocab_size=vocab_size(tokenizer),
        tokenizer_sha256=hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest(),
        sources=tuple(source.name for source in config.data.mixture),
        files=tuple(file.name for file in corpus.files),
    )
    header.write(folder)


def _write(config: ExperimentConfig, corpus: Corpus, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    writer = ShardWriter(corpus.folder, config.data, file_sources=corpus.sources, file_splits=corpus.splits)
    work = [
        Work(number, corpus.files[number], _form(config, corpus.sources[number]), after, corpus.splits[number])
        for number, after in writer.todo()
    ]
    if config.task.reads == "images":
        from tokendrop.data.prepare.images import build_image_rows  # which wants Pillow

        tokenize = build_image_rows(config.data, labels_of(tokenizer))
    else:
        tokenize = build_tokenize(config.data, tokenizer, config.task.reads, examples_of(config))
    for block in tokenized(work, tokenize):
        writer.add(block)
        progress(writer.documents, writer.tokens)
    return writer.finish()
