"""Token shards that were prepared before and copied into a store."""

import hashlib
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.fits import check_fits, check_form
from tokendrop.data.shards.cache import ShardCache, open_stored
from tokendrop.data.shards.format import Header
from tokendrop.data.shards.manifest import Manifest, read_manifest
from tokendrop.data.tokenizer import load_tokenizer
from tokendrop.errors import UserError

_PATIENCE_S = 30.0  # for the first answer of a store


def stored_shards(config: ExperimentConfig) -> Path | None:
    """This node's folder for the token shards of a job whose `data.folder` is in a store; None for other jobs.

    The corpus is not looked at.

    Raises:
        UserError: there are no token shards, not all of them, or others than the job trains on.
    """
    if not config.data.is_stored:
        return None
    folder = open_stored(config.data.folder, config.data.cache, patience_s=_PATIENCE_S)
    manifest = read_manifest(folder)
    _check_made_for(config, manifest.header)
    check_fits(config, manifest)
    ShardCache(folder).check(manifest)
    return folder


def bytes_at_once(config: ExperimentConfig, manifest: Manifest) -> int:
    """Bytes of the shards that a run goes back to again and again: a window of them, or all once it shuffles all."""
    window, steps = config.data.shuffle_rows, config.steps
    turns = [source.weight for source in config.data.mixture]
    needed = 0
    for source, turn in zip(manifest.header.sources, turns, strict=True):
        shards = manifest.stream(source, "train")
        rows, size = int(shards["rows"].to_numpy().sum()), int(shards["bytes"].to_numpy().sum())
        is_one_epoch = steps * config.train.global_batch * turn / sum(turns) <= rows
        needed += size if not is_one_epoch else size * min(window or rows, rows) // rows
    return needed


def _check_made_for(config: ExperimentConfig, header: Header) -> None:
    """Raises UserError where shards are of another form than the job's; of another corpus they may be."""
    data = config.data
    check_form(config, header)
    if config.task.reads == "images" and header.vocab_size != config.model.vocab_size:
        raise UserError(
            f"model.classes: the token shards in {data.folder} have {header.vocab_size}, this job"
            f" {config.model.vocab_size}"
        )
    if data.tokenizer and Path(data.tokenizer).exists():
        tokenizer = load_tokenizer(data.tokenizer, config.task.reads).to_str(pretty=True)
        if hashlib.sha256(tokenizer.encode()).hexdigest() != header.tokenizer_sha256:
            raise UserError(f"data.tokenizer: {data.tokenizer} is not the one of the token shards in {data.folder}")
