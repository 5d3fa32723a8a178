"""`tokendrop bench step`: step time by kept length beside the FLOPs, and a plain GPT-2 beside our baseline."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.bench.reference import PlainGpt
from tokendrop.config.load import build
from tokendrop.config.model import GptConfig
from tokendrop.config.train import TrainConfig
from tokendrop.method import Dropping, Route, attach
from tokendrop.models.batch import Batch
from tokendrop.models.build import build_model
from tokendrop.schedule.duration import Duration
from tokendrop.train.device import autocast, compile_layers, pick_device, pick_dtype, tune_cpu
from tokendrop.train.engine import Engine
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizer

_CPU_MODEL = GptConfig(layers=8, width=256, heads=4, sequence_length=512, vocab_size=4096)
_GPU_PRESET, _GPU_VOCABULARY = "gpt3-350m", 50304
_SHARES = (16, 8, 4, 2, 1)


def bench_step(
    *, preset: str | None, micro_batch: int, precision: str, compiled: bool, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time whole training steps (draw, forward, backward, clip, AdamW) at kept lengths from 1/16 to full."""
    device = pick_device()
    tune_cpu()
    dtype = pick_dtype(precision, device)
    config = _model(preset, device)
    batch = random_batch(config, micro_batch, device)
    training = TrainConfig(length=Duration.parse("1 steps"), global_batch=1, micro_batch=1, peak_lr=1e-4)

    engine, dropping = bench_engine(config, replace(training, compile=compiled), device, dtype)
    plain = PlainGpt(config).to(device)
    plain_optimizer = build_optimizer(plain, training)

    lengths = {f"1/{share}": config.sequence_length // share for share in _SHARES}
    cases = {name: partial(timed_step, engine, dropping, batch, kept_length=kept) for name, kept in lengths.items()}
    cases["plain"] = partial(_plain_step, plain, plain_optimizer, batch, dtype)
    for warm_up in cases.values():
        warm_up()
        warm_up()
    seconds = interleave(cases, rounds=rounds, say=say)

    figures = _figures(seconds, config, lengths)
    figures["tokens_per_s_full"] = figure([batch.input_ids_BS.numel() / s for s in seconds["1/1"]], "tokens/s")
    precision_name = "bf16" if dtype == torch.bfloat16 else "fp32"
    command = f"tokendrop bench step --micro-batch {micro_batch} --precision {precision_name} --rounds {rounds}"
    command += f" --preset {preset}" if preset else ""
    return bench_result("step", figures, command + (" --compile" if compiled else ""))


def bench_engine(
    config: GptConfig,
    training: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    routes: Sequence[Route] | None = None,
) -> tuple[DdpEngine, Dropping]:
    """A model on its device, ready to train and to drop tokens; random-LTD's routes when they are left out."""
    model = build_model(config, seed=1, activation_checkpointing=training.activation_checkpointing)
    model = model.to(device, torch.promote_types(dtype, torch.float32))
    dropping = attach(model, seed=1, routes=routes)
    if training.compile:
        compile_layers(model.blocks)
    return DdpEngine(model, build_optimizer(model, training), dtype), dropping


def _figures(seconds: Mapping[str, list[float]], config: GptConfig, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Step times and their ratios to the full length, beside those of the FLOPs."""
    full, dropped = seconds["1/1"], config.layers - 2
    flops = {name: config.shape.flops(kept=kept, dropped_layers=dropped) for name, kept in lengths.items()}
    figures: dict[str, Any] = {}
    for name in lengths:
        figures[f"step_ms_at_{name}"] = figure([s * 1e3 for s in seconds[name]], "ms")
        figures[f"time_ratio_at_{name}"] = figure(ratios(seconds[name], full), "x full")
        figures[f"flops_ratio_at_{name}"] = figure([flops[name] / flops["1/1"]], "x full")
    quarter = flops["1/4"] / flops["1/1"]
    figures["time_over_flops_at_quarter"] = figure([r / quarter for r in ratios(seconds["1/4"], full)], "x")
    figures["plain_gpt2_over_ours"] = figure(ratios(seconds["plain"], full), "x time")
    return figures


def timed_step(
    engine: Engine,
    dropping: Dropping | None,
    batch: Batch,
    *,
    kept_length: int,
    micro_batches: int = 1,
    update: bool = True,
) -> float:
    """Seconds of draw, forward and backward, so often, and of clip and AdamW where `update` is set."""
    synchronize(batch)
    started = time.perf_counter()
    where: Any = {"sequence_length": batch.input_ids_BS.shape[1], "device": batch.input_ids_BS.device}
    for left in reversed(range(micro_batches)):
        if dropping is not None:
            dropping.draw(kept_length=kept_length, step=0, sample_ids=batch.sample_ids_B, **where)
        engine.forward_backward(batch, share=1 / micro_batches, last_micro_batch=left == 0)
    if update:
        engine.step(lr=1e-4, max_grad_norm=1.0)
    synchronize(batch)
    return time.perf_counter() - started


def _plain_step(model: PlainGpt, optimizer: torch.optim.Optimizer, batch: Batch, dtype: torch.dtype) -> float:
    synchronize(batch)
    started = time.perf_counter()
    with autocast(batch.input_ids_BS.device, dtype):
        loss = model(batch.input_ids_BS, batch.labels_BS)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    synchronize(batch)
    return time.perf_counter() - started


def _model(preset: str | None, device: torch.device) -> GptConfig:
    if preset is None and device.type == "cpu":
        return _CPU_MODEL
    preset = preset or _GPU_PRESET
    return build(GptConfig, {"preset": preset, "vocab_size": _GPU_VOCABULARY}, "model")


def random_batch(config: GptConfig, micro_batch: int, device: torch.device) -> Batch:
    """Sequences of random tokens."""
    tokens = torch.randint(config.vocab_size, (micro_batch, config.sequence_length + 1), device=device)
    ids = torch.arange(micro_batch)
    return Batch(input_ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], sample_ids_B=ids)


def synchronize(batch: Batch) -> None:
    """Return when the batch's device has done what it was given."""
    if batch.input_ids_BS.is_cuda:
        torch.cuda.synchronize()
