"""`tokendrop bench device`: what random-LTD saves of the time on this device, for models of several sizes."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokendrop.bench.device_model import Measured, expected_s, measure_model
from tokendrop.bench.device_result import main_figures, model_result, step_flops
from tokendrop.bench.figures import machine
from tokendrop.bench.peaks import peak_flops_per_s
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.errors import UserError
from tokendrop.train.device import pick_device, pick_dtype, tune_cpu
from tokendrop.train.fp8 import check_fp8_here

_MICRO_BATCHES = 32  # of a step, by which the schedule alone is laid out: 256 sequences, as GPT-3 350M
_BUCKETS = 6  # of a schedule whose shapes have a graph each
Way = tuple[bool | str, bool, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How a preset is measured."""

    micro_batch: int
    sequence_length: int
    vocab_size: int


SIZES = {
    "gpt-1m": Size(micro_batch=2, sequence_length=256, vocab_size=4096),
    "gpt-5m": Size(micro_batch=2, sequence_length=512, vocab_size=4096),
    "gpt3-125m": Size(micro_batch=16, sequence_length=2048, vocab_size=50304),
    "gpt3-350m": Size(micro_batch=8, sequence_length=2048, vocab_size=50304),
    "gpt3-1.3b": Size(micro_batch=4, sequence_length=2048, vocab_size=50304),
}
"""By rising size. Micro batches are meant to let our model and the plain one fit into 80 GB together."""
_ON_CPU, _ON_GPU = ("gpt-1m", "gpt-5m"), ("gpt3-125m", "gpt3-350m", "gpt3-1.3b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure."""

    presets: Sequence[str] = ()
    """By rising size; by device when empty."""
    minutes: float
    """Of all of it; of the presets, the largest are left out for it."""
    micro_batch: int | None = None
    """Of every preset; by preset when left out."""
    precision: str
    compiled: bool | None = None
    """By device when left out: on GPUs."""
    rounds: int
    """At most, for each preset."""
    fp8: str | None = None
    """The job's `train.fp8`, of each preset beside without; emulated on a CPU."""
    static: bool = False
    """Whether to measure each preset with `train.compile: static` too."""
    cuda_graphs: bool = False
    """Whether to measure each preset with `train.cuda_graphs` too."""


def read_presets(text: str) -> tuple[str, ...]:
    """Names of presets with commas between them, by rising size.

    Raises:
        UserError: one of them is none that is measured.
    """
    names = {name.strip() for name in text.split(",")}
    if not names <= SIZES.keys():
        raise UserError(f"--presets: want some of {','.join(SIZES)}, got {text[:80]!r}")
    return tuple(name for name in SIZES if name in names)


def bench_device(
    wanted: Wanted, *, log: Callable[[str], None], save: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Measure each preset that fits into the time and into the device's memory.

    Args:
        save: is given the result so far after each preset, so that a process that is ended leaves something.
    Raises:
        UserError: the device does not compute in the precision that is asked for, or has no fp8 or CUDA graphs.
    """
    started = time.perf_counter()
    device = pick_device()
    tune_cpu()
    result = _empty(wanted, device)
    presets = wanted.presets or (_ON_GPU if device.type == "cuda" else _ON_CPU)
    before: dict[Way, tuple[ExperimentConfig, Measured]] = {}
    jobs = jobs_of(presets, wanted, result["compiled"], device)
    for number, config in enumerate(jobs):
        left_s = 60 * wanted.minutes - (time.perf_counter() - started)
        share_s = left_s / (len(jobs) - number)
        last = before.get(_way(config)) or next(reversed(before.values()), None)
        measured = _too_long(config, last, left_s) or _measured(
            config, device, rounds=wanted.rounds, share_s=share_s, log=log
        )
        if isinstance(measured, str):
            log(f"skipped  {config.name}: {measured}")
            result["skipped"].append({"preset": config.name, "reason": measured})
        else:
            result["models"].append(model_result(config, measured, result["peak_flops_per_s"]))
            result["figures"] |= main_figures(result["models"][-1])
            before[_way(config)] = config, measured
        result["elapsed_s"] = time.perf_counter() - started
        save(result)
    return result


def _way(config: ExperimentConfig) -> Way:
    """What makes models of one size take another time."""
    return config.train.compile, config.train.cuda_graphs, config.train.fp8


def _empty(wanted: Wanted, device: torch.device) -> dict[str, Any]:
    """The result before the first model."""
    started = time.perf_counter()
    torch.zeros(1, device=device)
    device_s, here = time.perf_counter() - started, machine()
    dtype = pick_dtype(wanted.precision, device)
    return {
        "bench": "device",
        "machine": here,
        "precision": "bf16" if dtype == torch.bfloat16 else "fp32",
        "compiled": device.type == "cuda" if wanted.compiled is None else wanted.compiled,
        "peak_flops_per_s": peak_flops_per_s(here["device"], dtype),
        "minutes": wanted.minutes,
        "figures": {},
        "models": [],
        "skipped": [],
        "device_s": device_s,
        "elapsed_s": 0.0,
        "command": command_of(wanted),
    }


def _too_long(config: ExperimentConfig, before: tuple[ExperimentConfig, Measured] | None, left_s: float) -> str | None:
    """Why there is no time for a model, by the one that was measured before it; None where there is."""
    if before is None:
        return None
    last, measured = before
    layers, work = config.model.layers / last.model.layers, step_flops(config) / step_flops(last)
    parameters = config.model.shape.parameters / last.model.shape.parameters
    need_s = expected_s(measured, layers=layers, parameters=parameters, work=work)
    return f"takes about {need_s:.0f} s, and {max(left_s, 0):.0f} s are left of --minutes" if need_s > left_s else None


def _measured(
    config: ExperimentConfig, device: torch.device, *, rounds: int, share_s: float, log: Callable[[str], None]
) -> Measured | str:
    """What was measured, or why it could not be."""
    torch.compiler.reset()  # graphs of another model would count towards the most that a layer may have
    try:
        return measure_model(config, device, rounds=rounds, share_s=share_s, log=log)
    except torch.OutOfMemoryError as error:
        reason = f"does not fit into the device's memory beside the plain model: {str(error).splitlines()[0]}"
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return reason


def jobs_of(presets: Sequence[str], wanted: Wanted, compiled: bool, device: torch.device) -> Sequence[ExperimentConfig]:
    """What is measured, in order: each preset, then that in each other way that is wanted.

    Raises:
        UserError: one of them is not to be had here, or not beside the precision.
    """
    if wanted.cuda_graphs and device.type != "cuda":
        raise UserError(f"--cuda-graphs: want a GPU; this is a {device.type}")
    ways: dict[str, dict[str, Any]] = {"": {}}
    if wanted.fp8 is not None:
        ways[f"-fp8-{wanted.fp8}"] = {"fp8": wanted.fp8, "fp8_emulated": device.type == "cpu"}
    if wanted.static:
        ways["-static"] = {"compile": "static"}
    if wanted.cuda_graphs:
        ways["-cuda-graphs"] = {"compile": "static", "cuda_graphs": True}
    jobs = [job_of(preset, wanted, compiled, way=way, **keys) for preset in presets for way, keys in ways.items()]
    for job in jobs:
        check_fp8_here(job.train, device)
    return jobs


def job_of(preset: str, wanted: Wanted, compiled: bool, *, way: str = "", **keys: Any) -> ExperimentConfig:
    """A job of the preset with the paper's schedule: from 1/16 of the sequence on, 1/128 more every 1.75e9 tokens.

    Args:
        way: what is added to its name where
        keys: of `train` differ.
    """
    size = SIZES[preset]
    length, shape = size.sequence_length, {"sequence_length": size.sequence_length, "vocab_size": size.vocab_size}
    micro_batch = wanted.micro_batch or size.micro_batch
    batch = {"global_batch": _MICRO_BATCHES * micro_batch, "micro_batch": micro_batch}
    training = {"peak_lr": 1e-4, "precision": wanted.precision, "compile": compiled}
    training |= {"tokens_per_micro_batch": "auto", **keys}
    schedule = {"kind": "mslg", "start": length // 16, "increment": length // 128, "every": "1.75e9 tokens"}
    tree = {
        "name": f"{preset}{way}",
        "model": {"kind": "gpt", "preset": preset, **shape},
        "data": {"corpus": ["random"]},
        "train": {"length": "300e9 tokens", **batch, **training},
        "drop": {"method": "random_ltd", "schedule": schedule, "buckets": _BUCKETS if "compile" in keys else None},
        "scaling": {"gpus_per_worker": int("cuda_graphs" in keys)},
    }
    return build(ExperimentConfig, tree, "")


def command_of(wanted: Wanted) -> str:
    """What to type for the same."""
    words = [f"tokendrop bench device --minutes {wanted.minutes:g} --rounds {wanted.rounds}"]
    words += [f"--precision {wanted.precision}"]
    words += [f"--presets {','.join(wanted.presets)}"] if wanted.presets else []
    words += [f"--fp8 {wanted.fp8}"] if wanted.fp8 else []
    words += ["--static"] * wanted.static + ["--cuda-graphs"] * wanted.cuda_graphs
    words += [f"--micro-batch {wanted.micro_batch}"] if wanted.micro_batch else []
    words += [] if wanted.compiled is None else ["--compile" if wanted.compiled else "--no-compile"]
    return " ".join(words)
