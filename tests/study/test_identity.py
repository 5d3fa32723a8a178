"""What names a trial: the same today as when trials were trained whose names people have."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from corpora import tiny_job
from sweeps import DROPS
from tokendrop.config.load import load_job
from tokendrop.schedule.duration import Duration
from tokendrop.study.identity import run_name, settings_of
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trials import expand

ROOT = Path(__file__).parents[2]
NAMES = {  # of the first seed
    "small_gpt_growth": ["trial-97784a5649b5", "trial-f31855e6b4f1"],
    "small_vit_random_ltd": ["trial-dcbd5e80d2de", "trial-61451169ef28"],
    "sst2_learning_rates": ["trial-1282e66f2dd2", "trial-0bff2d766c45", "trial-fbace5ac911b", "trial-d7954efba95d"],
}


@pytest.mark.parametrize("name", NAMES)
def test_the_trials_of_a_shipped_sweep_keep_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "jobs" / "sweeps" / f"{name}.yaml"
    trials = expand(load_sweep(path), path)
    first = [one.run for one in trials if one.config.seed == trials[0].config.seed]
    assert first == NAMES[name], (
        "a trial that was trained would be trained again; a key that is new has to leave names as they are where it"
        " changes nothing (study/identity.py)"
    )


def defaults(branch: Any, tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys that a job leaves out, with the values that they have then.

    Args:
        tree: what the job's file says of the branch.
    """
    for field in fields(branch):
        value, key = getattr(branch, field.name), f"{prefix}{field.name}"
        if is_dataclass(value) and not isinstance(value, Duration):
            yield from defaults(value, tree.get(field.name, {}), f"{key}.")
        elif field.name not in tree and field.init:
            yield key, str(value) if isinstance(value, Duration) else value


@pytest.mark.parametrize("drop", [{"method": "none"}, DROPS], ids=["none", "random_ltd"])
def test_a_key_that_is_given_its_default_names_the_same_trial(tmp_path, drop):
    path = tiny_job(tmp_path, ["python"], drop=drop)
    job = load_job(path)
    left_out = dict(defaults(job, yaml.safe_load(path.read_text())))
    assert {"seed", "train.weight_decay", "data.epoch_samples", "evaluate.tasks"} <= set(left_out)

    for key, value in left_out.items():
        given_too = load_job(path, [f"{key}={json.dumps(value, default=str)}"])
        assert run_name(settings_of(given_too)) == run_name(settings_of(job)), key
