"""What a job leaves open until it begins: the checkpoint behind a name, its tokenizer, the length of an epoch."""

from dataclasses import replace
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.cut_examples import note_of_cut
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.watch import prepare_line
from tokendrop.output import log
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, newest_whole


def as_begun(config: ExperimentConfig, run: Path) -> ExperimentConfig:
    """A job with what was found when its run began, for what it does not say itself.

    From the first checkpoint on, other weights are of no more use, and may be gone. Before it, the run begins anew.

    Raises:
        UserError: as `with_initial`, where the run has no checkpoint.
        DamagedDataError: what describes the run is damaged, or all of its checkpoints are.
    """
    if newest_whole(run / CHECKPOINTS) is None:
        return with_initial(config)
    begun, _ = open_run_folder(run)
    model, data = config.model, config.data
    if model.init_from is not None:
        tokenizer = data.tokenizer or begun.data.tokenizer
        model, data = replace(model, init_from=begun.model.init_from), replace(data, tokenizer=tokenizer)
    samples = data.epoch_samples or begun.data.epoch_samples
    return replace(config, model=model, data=replace(data, epoch_samples=samples))


def with_epochs(config: ExperimentConfig) -> ExperimentConfig:
    """A job with durations in epochs, with the number of samples of one: its whole corpus is prepared first.

    Raises:
        UserError: something is wrong with the corpus or the tokenizer, or the job with so many samples.
    """
    connect(name=config.name)
    with HeadWatch(), prepare_line(config) as progress:
        folder = prepare(config, progress=progress)
    if note := note_of_cut(folder):
        log(f"note     {note}")
    manifest = read_manifest(folder)
    samples = sum(manifest.committed("train").rows)
    try:
        return replace(config, data=replace(config.data, epoch_samples=samples))
    except ValueError as error:
        raise UserError(f"{error} (an epoch of this corpus has {samples:,} samples)") from None


def with_initial(config: ExperimentConfig) -> ExperimentConfig:
    """A job with the checkpoint that `model.init_from` means now, and with that model's tokenizer if it names none.

    Raises:
        UserError: there is no such model, or it is not of the job's sizes.
    """
    model, data = config.model, config.data
    if model.init_from is None:
        return config
    from tokendrop.train.initial import check_sizes, find_initial  # takes a second, and most jobs have nothing of it

    source = find_initial(model.init_from, model.kind)
    check_sizes(model, source, outputs=config.task.outputs)
    if config.task.reads == "images":
        return replace(config, model=replace(model, init_from=source.place))
    tokenizer = data.tokenizer or source.tokenizer
    if tokenizer is None:
        raise UserError(f"data.tokenizer: want a tokenizer; {source.place} has none of its own (tokenizer.json)")
    return replace(config, model=replace(model, init_from=source.place), data=replace(data, tokenizer=tokenizer))
