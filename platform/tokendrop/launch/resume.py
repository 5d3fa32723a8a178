"""What a run that goes on must have in common with the run that it was."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tokendrop.config import plugin
from tokendrop.config.data import CacheConfig
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.prepare.fits import check_fits
from tokendrop.data.prepare.stored import stored_shards
from tokendrop.data.shards.files import check_files
from tokendrop.data.shards.format import MANIFEST, ORIGIN
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch.results import with_absolute_paths
from tokendrop.secrets import redact
from tokendrop.track.parameters import flat
from tokendrop.track.run_folder import JOB, check_model, open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, newest_whole, set_aside

# What a run that goes on may have anew: where and how it runs, is saved, tracked and evaluated, and how long it is;
# keys, and branches with all their keys. What is left out decides what is trained.
MAY_CHANGE = (
    *("name", "run", "runs_folder", "scaling", "checkpoint", "track", "evaluate", "model.preset"),
    "model.init_from",
    *("train.length", "train.micro_batch", "train.strategy", "train.zero_stage"),
    *("train.compile", "train.cuda_graphs", "train.attention"),
    *("train.tensor_parallel", "train.context_parallel", "train.fp8_emulated"),
    *("train.tokens_per_micro_batch", "train.activation_checkpointing", "train.profile"),
    # whose token shards are compared by `check_same_rows`
    *("data.corpus", "data.tokenizer", "data.folder", "data.cache", "data.reader", "data.max_rejected"),
    *("data.validation_corpus", "data.test_corpus", "data.epoch_samples"),
)
NEW_RUN = "or a new run, with model.init_from for the same weights"
WITHOUT_DROPOUT = ("train.micro_batch",)
"""Of these, what may change only where there is no dropout, which is drawn for each micro batch."""


def check_goes_on(config: ExperimentConfig, run: Path) -> None:
    """Check that this job can go on from the checkpoints of `run`, as what it was.

    Raises:
        UserError: something that decides what is trained is another, or the checkpoint does not hold tensors.
        DamagedDataError: what describes the run is damaged, or all of its checkpoints are.
    """
    decided, _ = open_run_folder(run)
    begun = load_job(run / JOB, to_run=False)  # decided no further than the job itself says
    checkpoint = newest_whole(run / CHECKPOINTS)
    if checkpoint is None:
        return
    from tokendrop.train.storage import read_index  # takes a second, and a run that begins has nothing of it

    check_model(checkpoint, config)
    step, steps = read_index(checkpoint).meta["step"], config.plan.steps
    if step > steps:
        raise UserError(f"train.length: {run} is at step {step}, this job ends at {steps}; want a longer one")
    check_own_files(config, run)
    if config.drop.adaptive and config.steps != begun.steps:
        raise UserError(
            f"train.length: {run} decides the kept lengths of {begun.steps} steps, this job has {config.steps};"
            " want the same, or a new run"
        )
    was, now = settings(begun), settings(config)
    for key in {**was, **now}:
        if was.get(key) != now.get(key):
            raise UserError(
                f"{key}: {run} began with {was.get(key, 'nothing')}, this job has {now.get(key, 'nothing')};"
                " want the same, or a new run"
            )
    if not config.drop.adaptive:  # whose decisions are those of the run
        check_consumed(config, decided, step, run=run, keys=["train.length"])


def take_up(config: ExperimentConfig, run: Path) -> None:
    """As `check_goes_on`, by who holds the run's lock: checkpoints that are damaged get another name."""
    check_goes_on(config, run)
    if newest := newest_whole(run / CHECKPOINTS):
        set_aside(newest)


def check_consumed(
    config: ExperimentConfig, begun: ExperimentConfig, step: int, *, run: object, keys: Sequence[str]
) -> None:
    """Raises UserError where the job's plan would have consumed something else than `run` has up to a step.

    What a run consumed, and a learning rate by layer tokens, is a function of its own job alone.

    Args:
        begun: the job of `run`.
        keys: those that the two jobs differ in.
    """
    plan, before = config.plan, begun.plan
    if step > before.steps or (plan.layer_tokens(step), plan.flops(step)) == (
        before.layer_tokens(step),
        before.flops(step),
    ):
        return
    raise UserError(
        f"{', '.join(keys)}: up to step {step} this job would consume {plan.layer_tokens(step):,} layer tokens and"
        f" {plan.flops(step):.6g} FLOPs, {run} has consumed {before.layer_tokens(step):,} and"
        f" {before.flops(step):.6g}; want a schedule that is the same so far, such as one of kind piecewise, {NEW_RUN}"
    )


def check_own_files(config: ExperimentConfig, run: Path) -> None:
    """Raises UserError where the file of a method or task of the user's own is another than the run began with."""
    for key, name in (("drop.method", config.drop.method), ("task.kind", config.task.kind)):
        file, copy = plugin.file_of(name), plugin.copy_of(name, run)
        if file is None or copy is None or not (file.is_file() and copy.is_file()):
            continue
        if file.read_bytes() != copy.read_bytes():
            raise UserError(f"{key}: {file} has changed since {run} began; want it as it was, in {copy}, or a new run")


def settings(config: ExperimentConfig) -> dict[str, str]:
    """All settings that decide what is trained, by dotted key."""
    found = flat(asdict(config))
    found["data.sources"] = ", ".join(f"{source.name} {source.weight:g}" for source in config.data.mixture)
    held = set(WITHOUT_DROPOUT) if config.model.dropout else set[str]()
    free = set(MAY_CHANGE) - held
    return {key: value for key, value in found.items() if not free & {key, *_branches(key)}}


def _branches(key: str) -> list[str]:
    """The branches that a key is in: of a.b.c those are a and a.b."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def shards_at_hand(config: ExperimentConfig, run: Path) -> Path | None:
    """The token shards of `run` where all of them are there; its corpus and its tokenizer may then be gone.

    Below the job's `data.folder`, where they were moved, or of the store that it names. None where the job names
    another corpus or tokenizer than the run began with.

    Raises:
        DamagedDataError: a shard is missing or cut short.
        UserError: the store does not have them.
    """
    begun, before = open_run_folder(run)
    if stored := stored_shards(config):
        return stored
    if _made_of(begun) != _made_of(config):
        return None
    for folder in (before, Path(config.data.folder) / before.name):
        if not (folder / MANIFEST).exists() or (folder / ORIGIN).exists():
            continue
        if (manifest := read_manifest(folder)).header.is_complete:
            check_fits(config, manifest)
            check_files(folder, manifest)
            return folder
    return None


def _made_of(config: ExperimentConfig) -> str:
    """What a job's shards are made of, and how; without secrets, which a run's job.yaml does not have."""
    # less what says only where they lie, and how they are read or counted
    read = {"folder": "", "cache": CacheConfig(), "reader": "memory_map", "max_rejected": 0, "epoch_samples": None}
    data = replace(with_absolute_paths(config).data, **read)
    return redact(str((asdict(config.task), config.model.kind, config.model.sequence_length, data)))


def check_same_rows(run: Path, data: Path) -> None:
    """Raises UserError where the token shards in `data` are known to be other ones than those that `run` began with."""
    begun, before = open_run_folder(run)
    if before == data or not committed(run / CHECKPOINTS):
        return
    if not (before / MANIFEST).exists():
        if begun.data.is_stored and (data / ORIGIN).exists() and before.name != data.name:  # names of what they hold
            raise UserError(f"data.folder: {run} began with other token shards; want those of {begun.data.folder}")
        return
    was = {shard.file: shard.sha256 for shard in read_manifest(before).shards}
    for shard in read_manifest(data).shards:
        if was.get(shard.file, shard.sha256) != shard.sha256:
            raise UserError(
                f"data: {run} began with the token shards in {before}, this job makes others in {data};"
                " want the corpus and the tokenizer that it began with"
            )
