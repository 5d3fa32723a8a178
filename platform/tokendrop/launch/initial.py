"""What a job leaves open until it begins: the checkpoint behind a name, its tokenizer, the length of an epoch."""

from dataclasses import replace
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.watch import prepare_line
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.initial import check_sizes, find_initial


def as_begun(config: ExperimentConfig, run: Path) -> ExperimentConfig:
    """A job with what was found when its run began: its other weights are of no more use, and may be gone."""
    begun, _ = open_run_folder(run)
    model, data = config.model, config.data
    if model.init_from is not None:
        model, data = replace(model, init_from=begun.model.init_from), replace(data, tokenizer=begun.data.tokenizer)
    samples = begun.data.epoch_samples or data.epoch_samples
    return replace(config, model=model, data=replace(data, epoch_samples=samples))


def with_epochs(config: ExperimentConfig) -> ExperimentConfig:
    """A job whose length is in epochs, with the number of samples of one: its whole corpus is prepared first."""
    with HeadWatch(), prepare_line() as progress:
        manifest = read_manifest(prepare(config, progress=progress))
    return replace(config, data=replace(config.data, epoch_samples=sum(manifest.committed("train").rows)))


def with_initial(config: ExperimentConfig) -> ExperimentConfig:
    """A job with the checkpoint that `model.init_from` means now, and with that model's tokenizer if it names none.

    Raises:
        UserError: there is no such model, or it is not of the job's sizes.
    """
    model, data = config.model, config.data
    if model.init_from is None:
        return config
    source = find_initial(model.init_from)
    check_sizes(model, source)
    tokenizer = data.tokenizer or source.tokenizer
    if tokenizer is None:
        raise UserError(f"data.tokenizer: want a tokenizer; {source.place} has none of its own (tokenizer.json)")
    return replace(config, model=replace(model, init_from=source.place), data=replace(data, tokenizer=tokenizer))
