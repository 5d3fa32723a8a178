"""Batch, optimizer, learning rate, precision and strategy of a DeepSpeed config, as keys of ours."""

from typing import Any

from tokendrop.config.deepspeed_values import DeepSpeedConfig
from tokendrop.config.files import Tree
from tokendrop.errors import UserError

LTD = "data_efficiency.data_routing.random_ltd"
_PEAK_LR = 3e-4
_NEVER_CLIPS = 1e9
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def batch_of(given: DeepSpeedConfig) -> tuple[int, int, int]:
    """Global batch, micro batch and workers, completed as DeepSpeed does on one GPU.

    Raises:
        UserError: neither batch is given, or they do not divide evenly.
    """
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (given.whole(key) for key in sizes)
    own = (f"{LTD}.global_batch_size", f"{LTD}.micro_batch_size")
    for key, size, of_ltd in zip(sizes, (batch, micro), own, strict=False):
        if (other := given.whole(of_ltd)) is not None and size is not None and size != other:
            given.note(of_ltd, f"{other}; DeepSpeed takes {key}={size}, and so does this job")
    if batch is None and micro is None:
        batch, micro = (given.whole(key) for key in own)
    if batch is None and micro is None:
        raise UserError("train_batch_size: want this or train_micro_batch_size_per_gpu, in sequences; found neither")
    if batch is None:
        assert micro is not None
        batch, workers = micro * (accumulation or 1), 1
        given.note("train_batch_size", f"not given; {batch} is that of one worker")
    elif micro is not None and accumulation is not None:
        workers = batch // (micro * accumulation)
    else:
        micro, workers = batch // (accumulation or 1) if micro is None else micro, 1
        given.note("scaling.workers", "not in the config; 1 is written, at the same batch")
    if not micro or not workers or batch % (micro * workers) or (accumulation and batch % (micro * accumulation)):
        parts = f"micro batch {micro}" + (f" x {accumulation} accumulated" if accumulation else "")
        raise UserError(f"train_batch_size: want a multiple of {parts}, got {batch}")
    return batch, micro, workers


def optimizer_of(given: DeepSpeedConfig) -> Tree:
    """Keys of `train` for the optimizer, and `peak_lr`.

    Raises:
        UserError: it is none of ours.
    """
    clip = given.number("gradient_clipping")
    if not clip:
        given.note("gradient_clipping", f"clips nothing there; max_grad_norm={_NEVER_CLIPS:g} never does here")
    found: Tree = {"max_grad_norm": clip or _NEVER_CLIPS}
    if given.branch("optimizer") is None:
        given.note("optimizer", f"not in the config; peak_lr={_PEAK_LR:g} and our AdamW are written, so set yours")
        return {"peak_lr": _PEAK_LR, **found}
    kind = given.text("optimizer.type") or ""
    if kind.lower() not in ("adam", "adamw", "sgd"):
        raise UserError(f"optimizer.type: want Adam, AdamW or SGD, which have a counterpart; got {kind[:40]!r}")
    _ = given.branch("optimizer.params")
    decay = given.number("optimizer.params.weight_decay")
    lr = given.number("optimizer.params.lr")
    if not lr:
        given.note("optimizer.params.lr", f"not given; peak_lr={_PEAK_LR:g} is written, so set yours")
    if kind.lower() == "sgd":
        momentum = given.number("optimizer.params.momentum") or 0.0
        return {
            "peak_lr": lr or _PEAK_LR,
            "optimizer": "sgd",
            "momentum": momentum,
            **_decay(given, decay or 0.0),
            **found,
        }
    is_torch = given.flag("optimizer.params.torch_adam") or False
    is_adamw = given.flag("optimizer.params.adam_w_mode") is not False or kind.lower() == "adamw"
    decay = decay if decay is not None else 0.01 if is_torch and is_adamw else 0.0
    if decay and not is_adamw:
        given.note(
            "optimizer.params.adam_w_mode", "false adds the decay to the gradient; here it is AdamW's, apart from it"
        )
    beta1, beta2 = _betas(given)
    epsilon = given.number("optimizer.params.eps")
    adam = {"beta1": beta1, "beta2": beta2, "epsilon": 1e-8 if epsilon is None else epsilon}
    return {"peak_lr": lr or _PEAK_LR, **_decay(given, decay), **adam, **found}


def _decay(given: DeepSpeedConfig, decay: float) -> Tree:
    if decay:
        given.note("optimizer.params.weight_decay", "of matrices alone here, not of biases and norms")
    return {"weight_decay": decay}


def _betas(given: DeepSpeedConfig) -> tuple[float, float]:
    betas: Any = given.value("optimizer.params.betas")
    if betas is None:
        return 0.9, 0.999
    if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(one, int | float) for one in betas):
        raise UserError("optimizer.params.betas: want two numbers, such as [0.9, 0.95]")
    return float(betas[0]), float(betas[1])


def scheduler_of(given: DeepSpeedConfig, peak_lr: float) -> tuple[Tree, int, int | None]:
    """Keys of `train` for the learning rate, the warm-up and, where it says so, the length of the run, in steps."""
    constant: Tree = {"decay": "constant", "warmup": "0 steps", "peak_lr": peak_lr}
    if given.branch("scheduler") is None:
        given.note("scheduler", "not in the config; the rate is constant, so set train.decay and train.warmup")
        return constant, 0, None
    kind, params = given.text("scheduler.type") or "", "scheduler.params"
    if kind not in _SCHEDULERS:
        given.note(
            "scheduler", f"{kind[:40]!r} has no counterpart; the rate is constant, so set train.decay and train.warmup"
        )
        _ = given.value("scheduler")
        return constant, 0, None
    _ = given.branch(params)
    warmup, total = given.whole(f"{params}.warmup_num_steps"), given.whole(f"{params}.total_num_steps")
    peak = _peak_of(given, kind, params) or peak_lr
    warmup = max(2, 1000 if warmup is None else warmup)
    if (given.text(f"{params}.warmup_type") or "log") != "linear":
        given.note(f"{params}.warmup_type", "rises by the logarithm of the step there, by a line here")
    least = f"{params}.warmup_min_{'ratio' if kind == 'WarmupCosineLR' else 'lr'}"
    if given.number(least):
        given.note(least, "has no counterpart; the warm-up begins at 0")
    given.note(
        "scheduler", f"{kind} of DeepSpeed is a step behind in its warm-up, the first step of which trains nothing"
    )
    rate: Tree = {"decay": _SCHEDULERS[kind], "warmup": f"{warmup} steps", "peak_lr": peak}
    if kind == "WarmupCosineLR":
        ratio = given.number(f"{params}.cos_min_ratio")
        rate["final_lr"] = peak * (1e-4 if ratio is None else min(1.0, ratio))
    return rate, warmup, total


def _peak_of(given: DeepSpeedConfig, kind: str, params: str) -> float | None:
    """The rate that a scheduler rises to; None where that is the optimizer's."""
    key = f"{params}.warmup_max_lr"
    if kind == "WarmupCosineLR":
        return None
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in (given.branch(params) or {}):
        given.note(key, "not in the config; WarmupDecayLR of DeepSpeed then rises to 0.001, not to the optimizer's lr")
        return 1e-3
    return given.number(key)


def precision_of(given: DeepSpeedConfig) -> str:
    """`train.precision`."""
    bf16 = [given.flag(f"{key}.enabled") for key in ("bf16", "bfloat16") if given.branch(key) is not None]
    autocast = given.branch("torch_autocast") is not None and given.flag("torch_autocast.enabled")
    dtype = given.text("torch_autocast.dtype") if autocast else None
    if any(bf16) or dtype in ("bfloat16", "bf16"):
        return "bf16"
    if (given.branch("fp16") is not None and given.flag("fp16.enabled")) or autocast:
        key = "torch_autocast" if autocast else "fp16"
        given.note(
            key, "float16 and its loss scaling have no counterpart; auto is bf16 where the device has it, else fp32"
        )
        _ = given.value(key)
        return "auto"
    return "fp32"


def strategy_of(given: DeepSpeedConfig, train: Tree) -> Tree:
    """Keys of `train` for ZeRO's stage; UserError where there is no such stage."""
    stage = given.whole("zero_optimization.stage", least=0) if given.branch("zero_optimization") is not None else 0
    if not stage:
        return {"strategy": "ddp"}
    if stage > 3:
        raise UserError(f"zero_optimization.stage: want 0, 1, 2 or 3, got {stage}")
    if train.get("optimizer", "adamw") != "adamw":
        given.note("zero_optimization.stage", f"{stage} wants AdamW here; ddp is written")
        return {"strategy": "ddp"}
    return {"strategy": "deepspeed", "zero_stage": stage}
