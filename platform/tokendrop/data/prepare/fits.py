"""What a job's token shards have to be, and whether those at hand are."""

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.examples import ExampleForm
from tokendrop.data.read.image_rows import IMAGE_ROW
from tokendrop.data.read.pair_runs import pair_row_length
from tokendrop.data.shards.format import Header
from tokendrop.data.shards.manifest import Manifest
from tokendrop.errors import UserError

_ROW = {"text": "{} tokens", "sentence_pairs": "a pair of sentences", "examples": "an example", "images": "an image"}


def check_fits(config: ExperimentConfig, manifest: Manifest) -> None:
    """Raises UserError where a job can't train on these token shards."""
    check_form(config, manifest.header)
    data = config.data
    row = _ROW[config.task.reads].format(config.model.sequence_length + 1)
    check_vocabulary(config, manifest.header.vocab_size)
    train, validation = manifest.committed("train").rows, manifest.committed("validation").rows
    empty = [("train", "less", data.corpus_key(number)) for number, rows in enumerate(train) if not rows]
    for split in data.held_out_corpora:
        if not any(manifest.committed(split).rows):
            raise UserError(f"data.{split}_corpus: its documents make no row of {row}; want more text")
    if not any(validation):
        empty.append(("validation", "more", data.corpus_key(0)))
    if data.epoch_samples not in (None, sum(train)):
        raise UserError(
            f"data.epoch_samples: this corpus makes {sum(train):,} training samples ({manifest.header.rejected:,}"
            f" documents were rejected), the job says {data.epoch_samples:,}; want data.epoch_samples={sum(train)}"
        )
    for split, remedy, key in empty:
        raise UserError(
            f"{key}: its documents make no {split} row of {row}; want more text,"
            f" or a data.validation_share {remedy} than {data.validation_share:g}"
        )


def check_form(config: ExperimentConfig, header: Header) -> None:
    """Raises UserError where token shards are of another form than the job's; of another corpus they may be."""
    data = config.data
    wanted = {
        "task.kind": (header.kind, config.task.reads),
        "model.sequence_length": (header.sequence_length, sequence_length_of(config)),
        "task": (header.row_length, row_length_of(config)),
        "data.sources": (", ".join(header.sources), ", ".join(source.name for source in data.mixture)),
    }
    for key, (have, want) in wanted.items():
        if have != want:
            raise UserError(f"{key}: this job reads {want}, the token shards in {data.folder} are of {have}")


def check_vocabulary(config: ExperimentConfig, size: int) -> None:
    """Raises UserError where the model has no embedding for each of so many tokens."""
    if config.task.reads == "images":
        return  # its labels were counted
    if size > config.model.vocab_size:
        raise UserError(f"model.vocab_size: want at least the tokenizer's {size} tokens, got {config.model.vocab_size}")


def examples_of(config: ExperimentConfig) -> ExampleForm | None:
    """What becomes of labelled examples; None for tasks that read others."""
    return ExampleForm.of(config.task, config.model.sequence_length) if config.task.reads == "examples" else None


def sequence_length_of(config: ExperimentConfig) -> int:
    """What shards depend on: images are kept as their files are, whatever the model makes of them."""
    return 1 if config.task.reads == "images" else config.model.sequence_length


def row_length_of(config: ExperimentConfig) -> int:
    """Numbers in a row of the job's token shards."""
    if examples := examples_of(config):
        return examples.row_length
    if config.task.reads == "images":
        return IMAGE_ROW
    length = config.model.sequence_length
    return length + 1 if config.task.reads == "text" else pair_row_length(length)
