"""A run's parameters in MLflow: what its job gives, and keys of a list."""

from dataclasses import asdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build, load_job
from tokendrop.track.parameters import ALWAYS, flat, listed, parameters

MODEL = {"kind": "gpt", "layers": 4, "width": 64, "heads": 4, "sequence_length": 128, "vocab_size": 512}
LEAST = {
    "name": "least",
    "model": MODEL,
    "data": {"corpus": ["python"]},
    "train": {"length": "100 steps", "global_batch": 8, "micro_batch": 1, "peak_lr": 1e-3},
}
REQUIRED = {"name", "data.corpus", *(f"{branch}.{key}" for branch in ("model", "train") for key in LEAST[branch])}
# a key, another value than its default, and that value as a parameter
OTHERS = {
    "seed": (7, "7"),
    "runs_folder": ("elsewhere", "elsewhere"),
    "model.dropout": (0.25, "0.25"),
    "model.positions": ("rotary", "rotary"),
    "train.warmup": ("5%", "5 %"),
    "train.beta2": (0.99, "0.99"),
    "train.compile": (True, "True"),
    "checkpoint.keep": (9, "9"),
    "checkpoint.every": ("50 steps", "50 steps"),
    "scaling.workers": (2, "2"),
    "scaling.cpus_per_worker": (4, "4"),
    "track.experiment": ("mine", "mine"),
    "data.validation_corpus": (["a.jsonl", "b.jsonl"], "a.jsonl, b.jsonl"),
    "track.tags": ({"who": "me"}, None),
    "evaluate.sequences": (8, "8"),
    "drop": ({"method": "random_ltd", "schedule": {"kind": "constant", "kept": 64}}, None),
    "task": ({"kind": "causal_lm"}, None),
}
BRANCHES = {
    "track.tags": {"track.tags.who": "me"},
    "drop": {"drop.method": "random_ltd", "drop.schedule.kind": "constant", "drop.schedule.kept": "64"},
    "task": {},
}


def job(changes):
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in LEAST.items()}
    for key, (value, _) in changes.items():
        branch, dot, name = key.rpartition(".")
        (tree.setdefault(branch, {}) if dot else tree)[name] = value
    return build(ExperimentConfig, tree, "")


@given(st.sets(st.sampled_from(sorted(OTHERS))))
def test_every_key_that_differs_from_its_default_is_a_parameter_and_the_rest_is_of_the_list(keys: set[str]) -> None:
    config = job({key: OTHERS[key] for key in keys})
    found = parameters(config)
    wanted = {key: OTHERS[key][1] for key in keys - BRANCHES.keys()}
    for key in keys & BRANCHES.keys():
        wanted |= BRANCHES[key]
    assert wanted.items() <= found.items()
    assert found.keys() - wanted.keys() - REQUIRED <= set(ALWAYS)
    assert found.keys() >= REQUIRED
    assert found.items() <= flat(asdict(config), text=listed).items()


def test_what_matters_is_shown_with_its_default() -> None:
    found, every = parameters(job({})), flat(asdict(job({})))
    assert {key: every[key] for key in ALWAYS if key in every}.items() <= found.items()
    assert (found["drop.method"], found["train.lr_clock"], found["seed"]) == ("none", "step", "1234")
    assert len(found) < len(every) / 2


def test_shipped_jobs_have_the_keys_of_the_list_between_them() -> None:
    """A key that is renamed is renamed in the list too."""
    folder = Path(__file__).parents[2] / "jobs" / "pretrain"
    keys = {key for path in sorted(folder.glob("quickstart*.yaml")) for key in flat(asdict(load_job(path)))}
    assert set(ALWAYS) <= keys
