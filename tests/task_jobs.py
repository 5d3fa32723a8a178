"""Jobs of each task, six steps long, on the data that the helpers of their kind write."""

from examples import TASKS
from images import MODEL, TASK
from pairs import LENGTH
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
