"""What a run that goes on must have in common with the run that it was."""

from dataclasses import asdict
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.shards import MANIFEST, read_manifest
from tokendrop.errors import UserError
from tokendrop.track.run_folder import CHECKPOINTS, open_run_folder
from tokendrop.train.committed import committed, committed_step, read_meta


def check_goes_on(config: ExperimentConfig, run: Path) -> None:
    """Raises UserError unless this job can go on from the checkpoints of `run`: same model, same order of samples."""
    begun, _ = open_run_folder(run)
    for checkpoint in committed(run / CHECKPOINTS)[-1:]:
        saved, wanted = read_meta(checkpoint)["model"], asdict(config.model)
        for key in wanted:
            if key != "preset" and saved.get(key) != wanted[key]:
                raise UserError(
                    f"{checkpoint}: a checkpoint of another model: model.{key} is {saved.get(key)} there"
                    f" and {wanted[key]} in this job"
                )
        step, steps = committed_step(run / CHECKPOINTS), config.plan().steps
        if step > steps:
            raise UserError(f"train.length: {run} is at step {step}, this job ends at {steps}; want a longer one")
        for key, was in _order_of_samples(begun).items():
            if (now := _order_of_samples(config)[key]) != was:
                raise UserError(
                    f"{key}: {run} began with {was}, this job has {now}; the samples that are left would be others"
                )


def _order_of_samples(config: ExperimentConfig) -> dict[str, object]:
    """The settings that decide which samples a step has, beside the token shards."""
    weights = ", ".join(f"{source.name} {source.weight:g}" for source in config.data.mixture)
    return {
        "seed": config.seed,
        "train.global_batch": config.train.global_batch,
        "data.shuffle_rows": config.data.shuffle_rows,
        "data.sources": weights,
    }


def check_same_rows(run: Path, data: Path) -> None:
    """Raises UserError where the token shards in `data` are known to be other ones than those that `run` began with."""
    _, before = open_run_folder(run)
    if before == data or not (before / MANIFEST).exists() or not committed(run / CHECKPOINTS):
        return
    was = {shard.file: shard.sha256 for shard in read_manifest(before).shards}
    for shard in read_manifest(data).shards:
        if was.get(shard.file, shard.sha256) != shard.sha256:
            raise UserError(
                f"data: {run} began with the token shards in {before}, this job makes others in {data};"
                " want the corpus and the tokenizer that it began with"
            )
