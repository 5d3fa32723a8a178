"""Jobs of each task and method, six steps long, on the data that the helpers of their kind write."""

from examples import TASKS
from images import MODEL, TASK
from pairs import LENGTH
from sharing import HAS_DEEPSPEED
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig

ADAPTIVE = {"kind": "adaptive", "start": 4, "increment": 4, "every": "1 steps", "budget": 0.6}
LONGER = ADAPTIVE | {"start": 8, "increment": 8}
LTD = {"kind": "linear", "start": 8, "until": "80%", "increment": 8}


def job(**changes: object) -> ExperimentConfig:
    """Six steps of a BERT on the pairs of `write_pairs`; dotted keys with `__` for the dots."""
    sizes = {"layers": 3, "width": 16, "heads": 2, "sequence_length": LENGTH, "vocab_size": 448}
    given = {"drop__schedule": LTD, "evaluate__sequences": 13, "train__micro_batch": 1} | changes
    norm = given.pop("norm", "post")
    return experiment(**{"model": {"kind": "bert", **sizes, "norm": norm}, "task": {"kind": "masked_lm"}, **given})


def examples_job(kind: str, **changes: object) -> ExperimentConfig:
    """The same of examples."""
    return job(**{"task": {"kind": "text_classification", **TASKS[kind]}, "train__peak_lr": 1e-3, **changes})


def images_job(**changes: object) -> ExperimentConfig:
    """The same of images."""
    schedule = {"kind": "linear", "start": 5, "until": "80%", "increment": 4}
    return job(**{"model": MODEL, "task": TASK, "drop__schedule": schedule, "train__peak_lr": 1e-3, **changes})


CASES = {
    "causal": experiment(evaluate__sequences=13, train__micro_batch=1),
    "decided as it goes": experiment(evaluate__sequences=13, train__micro_batch=1, drop__schedule=ADAPTIVE),
    "decided layer by layer, shared out": job(
        train__strategy="fsdp",
        drop={"method": "random_ltd", "full_length_layers": "none", "by_layer": {"0": LONGER, "1-2": LONGER}},
    ),
    "random-LTD, NSP": job(data__pairs={"sentence_task": "nsp"}),
    "special tokens kept, SOP": job(drop__keep_special_tokens=True),
    "pre-LN, no sentence task, few predictions": job(
        norm="pre", data__pairs={"sentence_task": "none", "max_predictions": 2, "whole_words": False}
    ),
    "shared out": job(train__strategy="fsdp", train__activation_checkpointing=True),
    "token bypass": job(drop__method="token_bypass", drop__special_tokens=[2, 3, 4]),
    "decided, token bypass": job(
        drop__method="token_bypass", drop__special_tokens=[2, 3, 4], drop__schedule=LONGER, model__layers=4
    ),
    "sequence warm-up": job(drop__method="sequence_warmup"),
    "classification": examples_job("pairs"),
    "classification, shared out": examples_job("pairs", norm="pre", train__strategy="fsdp"),
    "regression": examples_job("number"),
    "choices": examples_job("choices", drop={"method": "none"}),
    "images": images_job(),
    "images, [CLS] kept, SGD": images_job(drop__keep_special_tokens=True, train__optimizer="sgd"),
    "images, shared out": images_job(train__strategy="fsdp", train__activation_checkpointing=True),
}
METHODS = {
    "TREAD": experiment(evaluate__sequences=13, train__micro_batch=1, drop__method="tread"),
    "layer dropout, shared out": job(train__strategy="fsdp", drop={"method": "layer_dropout", "keep": 0.25}),
    "mixture of depths, rotary": experiment(
        evaluate__sequences=13,
        train__micro_batch=1,
        model__positions="rotary",
        drop={"method": "mixture_of_depths", "schedule": {"kind": "constant", "kept": 5}},
    ),
}
"""Methods that have no other case; not all of their micro batches grow."""
CASES |= METHODS
if HAS_DEEPSPEED:
    CASES["ZeRO 3"] = job(train__strategy="deepspeed", train__zero_stage=3, train__precision="fp32")
IN_GROUPS = ["causal", "decided as it goes", "random-LTD, NSP", "special tokens kept, SOP", "shared out", *METHODS]
IN_GROUPS += ["token bypass", "sequence warm-up", "classification, shared out"]
"""Cases that workers in groups train too, among them each method of dropping."""
