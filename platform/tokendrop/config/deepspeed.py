"""A DeepSpeed config with `random_ltd` as a job: the same kept length at every step, and a note on all that differs."""

from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from tokendrop.config.deepspeed_kept import FixedLinear, schedule_of
from tokendrop.config.deepspeed_training import LTD, batch_of, optimizer_of, precision_of, scheduler_of, strategy_of
from tokendrop.config.deepspeed_values import DeepSpeedConfig, read_deepspeed
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import Tree
from tokendrop.config.load import build
from tokendrop.config.model import BertConfig, GptConfig
from tokendrop.errors import UserError

_KINDS: dict[str, type[GptConfig] | type[BertConfig]] = {"gpt": GptConfig, "bert": BertConfig}
_KIND_OF = {"decoder": "gpt", "encoder": "bert"}
_VOCABULARY = {"gpt": 50304, "bert": 30592}
PRESETS = tuple(preset for kind in _KINDS.values() for preset in kind.PRESETS)
"""The models that `--model` may name."""
_SCHEDULE, _LR = f"{LTD}.random_ltd_schedule", f"{LTD}.layer_token_lr_schedule"


def job_of(path: Path, *, preset: str | None = None) -> tuple[str, list[str]]:
    """A DeepSpeed config as a job file, and what it says differently or not at all: a sentence each, also in the job.

    Args:
        preset: of the model, of which a DeepSpeed config tells the number of layers alone.
    Raises:
        UserError: it is no such config, has no random-LTD, or something that can't be the same and can't be left out.
    """
    given = read_deepspeed(path)
    try:
        tree = _tree(given, "".join(one if one.isalnum() or one in "-_." else "-" for one in path.stem), preset)
        build(ExperimentConfig, tree, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    given.note_the_rest()
    notes = [f"{key}: {sentence}" for key, sentence in given.notes]
    head = [f"From {path.name}, by `tokendrop import deepspeed`.", *notes]
    comments = "".join(f"# {line}\n" for line in head)
    return comments + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100), notes


def _tree(given: DeepSpeedConfig, stem: str, preset: str | None) -> Tree:
    _check_enabled(given)
    theirs = _schedule(given)
    schedule, is_outright = schedule_of(theirs)
    if is_outright:
        given.note(_SCHEDULE, "written stage by stage, for no rule of ours has DeepSpeed's roundings")
    model, layers = _model(given, preset, theirs.most)
    dropped = _dropped(given, layers)
    batch, micro, workers = batch_of(given)
    train: Tree = {"global_batch": batch, "micro_batch": micro, **optimizer_of(given)}
    rate, warmup, total = scheduler_of(given, train["peak_lr"])
    train |= rate | _clock(given, theirs, batch=batch, layers=layers, dropped=len(dropped), warmup=warmup, total=total)
    train |= {"precision": precision_of(given)} | strategy_of(given, train)
    whole = [layer for layer in range(layers) if layer not in dropped]
    names: dict[tuple[int, ...], str] = {(): "none", (0,): "first", (layers - 1,): "last"}
    names[0, layers - 1] = "first_and_last"
    given.note("scaling.gpus_per_worker", "1, for DeepSpeed's random-LTD runs on GPUs alone")
    return {
        "name": f"{stem.strip('.') or 'deepspeed'}"[:100],
        "seed": _seed(given),
        "model": model,
        "task": {"kind": "causal_lm" if model["kind"] == "gpt" else "masked_lm"},
        "data": {"corpus": ["python"]},
        "train": {"length": train.pop("length"), **train},
        "drop": {
            "method": "random_ltd",
            "full_length_layers": names.get(tuple(whole), whole),
            "schedule": schedule,
        },
        "scaling": {"workers": workers, "gpus_per_worker": 1},
    }


def _check_enabled(given: DeepSpeedConfig) -> None:
    above = ("data_efficiency", "data_efficiency.data_routing")
    if any(given.branch(key) is None for key in (*above, LTD)):
        raise UserError(f"{LTD}: want this branch, which configures random-LTD; found none")
    if not given.flag(f"{LTD}.enabled"):
        raise UserError(f"{LTD}.enabled: want true, or this config drops no token")
    for key in above:
        if not given.flag(f"{key}.enabled"):
            given.note(f"{key}.enabled", "not true; DeepSpeed drops tokens all the same, and so does this job")


def _needed(given: DeepSpeedConfig, key: str, *, least: int = 1) -> int:
    found = given.whole(key, least=least)
    if found is None:
        raise UserError(f"{key}: this key is needed and missing")
    return found


def _schedule(given: DeepSpeedConfig) -> FixedLinear:
    if given.branch(_SCHEDULE) is None:
        raise UserError(f"{_SCHEDULE}: this branch is needed and missing")
    if (kind := given.text(f"{_SCHEDULE}.schedule_type")) != "fixed_linear":
        raise UserError(f"{_SCHEDULE}.schedule_type: want fixed_linear, the only one that DeepSpeed has; got {kind!r}")
    _ = given.branch(f"{_SCHEDULE}.schedule_config")
    try:
        return FixedLinear(
            least=_needed(given, f"{_SCHEDULE}.min_value"),
            most=_needed(given, f"{_SCHEDULE}.max_value"),
            steps=_needed(given, f"{_SCHEDULE}.schedule_config.require_steps"),
            increment=_needed(given, f"{_SCHEDULE}.schedule_config.seq_per_step"),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{_SCHEDULE}: {error}") from None


def _model(given: DeepSpeedConfig, preset: str | None, length: int) -> tuple[Tree, int]:
    """The keys of `model`, and its layers."""
    layers, kind = _needed(given, f"{LTD}.total_layer_num"), _kind(given)
    sizes = _KINDS[kind].PRESETS
    if preset is not None and preset not in sizes:
        raise UserError(f"--model: want one of {', '.join(sizes)}, for {LTD}.model_type; got {preset[:40]!r}")
    if preset is None:
        preset = next((name for name, size in sizes.items() if size["layers"] == layers), None)
        if preset is None:
            raise UserError(f"{LTD}.total_layer_num: no model of ours has {layers}; want --model, for the other sizes")
        given.note("model", f"not in the config; {preset} has {layers} layers, --model names another")
    elif sizes[preset]["layers"] != layers:
        given.note(
            f"{LTD}.total_layer_num", f"{layers}, where {preset} has {sizes[preset]['layers']}; {layers} is written"
        )
    if sizes[preset]["sequence_length"] != length:
        given.note(
            f"{_SCHEDULE}.max_value", f"{length} is written as the sequence length, of which {preset} has another"
        )
    given.note("model.vocab_size", f"not in the config; {_VOCABULARY[kind]} is written")
    given.note("data.corpus", "not in the config; the text that comes with Python is written")
    tree: Tree = {"kind": kind, "preset": preset, "layers": layers, "sequence_length": length}
    return {**tree, "vocab_size": _VOCABULARY[kind]}, layers


def _kind(given: DeepSpeedConfig) -> str:
    theirs = given.text(f"{LTD}.model_type")
    if theirs not in _KIND_OF:
        raise UserError(f"{LTD}.model_type: want decoder or encoder, got {theirs!r}")
    return _KIND_OF[theirs]


def _dropped(given: DeepSpeedConfig, layers: int) -> list[int]:
    """Numbers of the layers that drop tokens."""
    key: str = f"{LTD}.random_ltd_layer_id"
    found: Any = given.value(key)
    is_list = isinstance(found, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in found)
    if not is_list or len({*found}) != len(found) or not all(0 <= one < layers for one in found):
        raise UserError(f"{key}: want different numbers of layers from 0 to {layers - 1}, as a list")
    if len(found) != (count := _needed(given, f"{LTD}.random_ltd_layer_num", least=0)):
        raise UserError(f"{LTD}.random_ltd_layer_num: is {count}, but random_ltd_layer_id has {len(found)} layers")
    return sorted(found)


def _clock(
    given: DeepSpeedConfig,
    theirs: FixedLinear,
    *,
    batch: int,
    layers: int,
    dropped: int,
    warmup: int,
    total: int | None,
) -> Tree:
    """Keys of `train` for the length of the run, and for what its learning rate counts."""
    steps = total or max(theirs.steps, warmup)
    if given.branch(_LR) is not None and given.flag(f"{_LR}.enabled"):
        given.note(_LR, "not implemented in DeepSpeed; here it is that of the paper's appendix C")
        found: Tree = {"lr_clock": "layer_token"}
        if (tokens := given.whole(f"{_LR}.warmup_layer_tokens", least=0)) is not None:
            exact = Fraction(tokens, batch * layers * theirs.most)
            found["warmup"] = f"{round(exact)} steps"
            if exact.denominator > 1:
                given.note(
                    f"{_LR}.warmup_layer_tokens",
                    f"{float(exact):.6g} steps at full length; {round(exact)} are written",
                )
        if (tokens := given.whole(f"{_LR}.total_layer_tokens")) is not None:
            return {**found, "length": f"{_steps_of(tokens, theirs, batch, layers, dropped)} steps"}
        return {**found, "length": f"{steps} steps"}
    if total is None:
        given.note("train.length", f"not in the config; {steps} steps are written, so set yours")
    return {"length": f"{steps} steps"}


def _steps_of(tokens: int, theirs: FixedLinear, batch: int, layers: int, dropped: int) -> int:
    """Steps that consume so many layer tokens, rounded up."""
    stages, steps = theirs.stages(), 0
    for (start, kept), (stop, _) in zip(stages, [*stages[1:], (None, 0)], strict=True):
        per_step = batch * (kept * dropped + theirs.most * (layers - dropped))
        steps = ceil(Fraction(tokens, per_step))
        if stop is None or steps <= stop - start:
            return start + steps
        tokens -= (stop - start) * per_step
    return steps


def _seed(given: DeepSpeedConfig) -> int:
    own, seed = given.whole("data_efficiency.seed", least=0), given.whole("seed", least=0)
    found = seed if seed is not None else 1234 if own is None else own
    given.note("seed", f"{found} draws other tokens and another order here")
    return found
