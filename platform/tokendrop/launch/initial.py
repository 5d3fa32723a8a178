"""What a job begins with, made exact: a checkpoint, and its tokenizer."""

from dataclasses import replace
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.initial import check_sizes, find_initial


def with_initial(config: ExperimentConfig, *, resume: Path | None = None) -> ExperimentConfig:
    """A job with the checkpoint that `model.init_from` means now, and with that model's tokenizer if it names none.

    Args:
        resume: the folder of the run that goes on; with a checkpoint of its own, it needs no other weights.
    Raises:
        UserError: there is no such model, or it is not of the job's sizes.
    """
    model, data = config.model, config.data
    if model.init_from is None:
        return config
    if resume is not None and committed(resume / CHECKPOINTS):
        begun, _ = open_run_folder(resume)
        place, tokenizer = begun.model.init_from, begun.data.tokenizer
    else:
        source = find_initial(model.init_from)
        check_sizes(model, source)
        place, tokenizer = source.place, source.tokenizer
        if data.tokenizer is None and tokenizer is None:
            raise UserError(f"data.tokenizer: want a tokenizer; {place} has none of its own (tokenizer.json)")
    return replace(
        config, model=replace(model, init_from=place), data=replace(data, tokenizer=data.tokenizer or tokenizer)
    )
