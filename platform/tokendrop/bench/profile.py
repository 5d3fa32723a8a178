"""`tokendrop profile`: what the machine at hand can do, for the planner of workers."""

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from tokendrop.bench.exchange import measure_link
from tokendrop.bench.figures import interleave, machine
from tokendrop.bench.full_node import measure_slowdown
from tokendrop.bench.restart import measure_restart_s
from tokendrop.bench.step import synchronize, timed_step
from tokendrop.config.drop import DropMethod, RandomLtd
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import ScalingConfig
from tokendrop.method import Dropping
from tokendrop.models.batch import Batch
from tokendrop.schedule.device import DeviceProfile, ModelSpeed, Point
from tokendrop.track.run_store import runs_place
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import step_name
from tokendrop.train.device import pick_device, pick_dtype, tune_cpu
from tokendrop.train.engines.base import Engine
from tokendrop.train.worker import build_engine

_SHARES = (16, 8, 4, 2, 1)


def measure_profile(config: ExperimentConfig, *, name: str, rounds: int, log: Callable[[str], None]) -> DeviceProfile:
    """Time the job's model on one worker of this machine, traffic between two, its checkpoint, and new workers."""
    device, scaling = pick_device(), config.scaling
    tune_cpu(scaling.cpus_per_worker)
    dtype, config = pick_dtype(config.train.precision, device), timed_job(config)
    engine, dropping = build_engine(config, device)

    speed, update_s = _speeds(config, engine, dropping, rounds=rounds, log=log)
    saved_per_s, restored_per_s = _checkpoint_bytes_per_s(engine, runs_place(config.runs_folder))
    del engine, dropping  # the next workers want their memory
    torch.cuda.empty_cache()
    log(f"storage  {saved_per_s / 1e6:.4g} MB/s to {config.runs_folder}, {restored_per_s / 1e6:.4g} MB/s from there")
    link, backend = measure_link()
    log(f"link     {link.bytes_per_s / 1e6:.4g} MB/s, {link.latency_s * 1e6:.4g} us by {backend}")
    resize_s = measure_restart_s(config)
    log(f"restart  {resize_s:.3g} s for two new workers")
    here = machine()
    devices = torch.cuda.device_count() or max(1, here["cores"] // scaling.cpus_per_worker)
    at_once = min(devices, max(2, scaling.most_workers))
    slowdown = measure_slowdown(config, workers=at_once, devices=devices, rounds=rounds)
    log(f"node     {slowdown:.3g} times as long a step with all {devices} devices at work, by {at_once} workers")
    return DeviceProfile(
        name=name,
        kind="measured",
        source=f"tokendrop profile on {here['device']}, {scaling.cpus_per_worker} of {here['cores']} cores a worker,"
        f" {dtype}, torch {here['torch']}, medians of {rounds} rounds. Links: 2 local processes by {backend}, the"
        " same between nodes unless told below, no overlap."
        f" full_node_slowdown: {at_once} workers at once. resize_s: 2 processes"
        " that start, import, connect and build the model. Not measured: what Ray adds to that, the start of a node,"
        " and the price, which are left open.",
        speeds=(speed,),
        devices_per_node=devices,
        full_node_slowdown=slowdown,
        within_node=link,
        between_nodes=link,
        update_s_per_parameter=update_s / speed.shape.parameters,
        checkpoint_bytes_per_s=saved_per_s,
        restore_bytes_per_s=restored_per_s,
        resize_s=resize_s,
    )


def timed_job(config: ExperimentConfig) -> ExperimentConfig:
    """What is timed of a job: one worker, a method that can be timed, no fp8, of which profiles tell nothing.

    Where a group's activations are bounded, all layers are computed again: for one worker the bound may be too low.
    """
    train = replace(config.train, tensor_parallel=1, context_parallel=1, fp8=None, fp8_emulated=False)
    if config.train.group > 1:
        train = replace(train, activation_checkpointing=bool(train.activation_checkpointing))
    had = config.scaling
    scaling = ScalingConfig(cpus_per_worker=had.cpus_per_worker, gpus_per_worker=had.gpus_per_worker)
    return replace(config, drop=_timed_method(config), train=train, scaling=scaling)


def _timed_method(config: ExperimentConfig) -> DropMethod:
    """The job's own where its layers see kept tokens; random-LTD stands for what else there is."""
    drop, model = config.drop, config.model
    is_timed = drop.spans(model.layers) and not drop.cuts and drop.counts == "tokens"
    return drop if is_timed and drop.scores(model.vocab_size) is None else RandomLtd()


def _speeds(
    config: ExperimentConfig, engine: Engine, dropping: Dropping | None, *, rounds: int, log: Callable[[str], None]
) -> tuple[ModelSpeed, float]:
    """Forward and backward at kept lengths from 1/16 to full and at the micro batch and half of it; one update."""
    task, length, micro_batch = config.task.build(config), config.model.sequence_length, config.train.micro_batch
    sizes = sorted({max(1, micro_batch // 2), micro_batch})
    lengths = sorted({max(1, length // share) for share in _SHARES})
    batches = {size: task.random_batch(size, pick_device()) for size in sizes}
    cases: dict[str, Callable[[], float]] = {
        f"{size}x{kept}": partial(
            timed_step, engine, dropping, batches[size], kept_length=kept, sequence_length=length, update=False
        )
        for size in sizes
        for kept in lengths
    }
    first = f"{sizes[0]}x{lengths[0]}"
    cases["update"] = partial(_update_s, engine, batches[sizes[0]], cases[first])
    for warm_up in cases.values():
        warm_up()
    seconds = {case: median(times) for case, times in interleave(cases, rounds=rounds, log=log).items()}
    points = (Point(kept_length=k, micro_batch=s, seconds=seconds[f"{s}x{k}"]) for s in sizes for k in lengths)
    speed = ModelSpeed(
        model=config.model.preset or config.name,
        shape=replace(config.plan.shape, head_drops=False),  # of a method that cuts, another one is timed
        dropped_layers=len(dropping.layers) if dropping else 0,
        points=tuple(points),
    )
    return speed, seconds["update"]


def _update_s(engine: Engine, batch: Batch, make_gradients: Callable[[], float]) -> float:
    make_gradients()
    started = time.perf_counter()
    engine.step(lr=1e-4, max_grad_norm=1.0)
    synchronize(batch)
    return time.perf_counter() - started


def _checkpoint_bytes_per_s(engine: Engine, runs: Path) -> tuple[float, float]:
    """Of a checkpoint as runs write it, to the disk that they write to, and as they read it from there."""
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=runs) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what we want
        checkpoints = Checkpoints(Path(folder), keep=1, meta={})
        started = time.perf_counter()
        checkpoints.save(engine, 1)
        checkpoints.wait()
        saved_s = time.perf_counter() - started
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        for path in files:
            _forget(path)
        started = time.perf_counter()
        checkpoints.load(engine, Path(folder) / step_name(1))
        return size / saved_s, size / (time.perf_counter() - started)


def _forget(path: Path) -> None:
    """Let the system drop a file from its cache, so that it is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
