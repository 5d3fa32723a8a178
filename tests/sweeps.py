"""Sweep files over a tiny job, for tests that plan them."""

from pathlib import Path
from typing import Any

import yaml

from corpora import tiny_job
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trials import Trial, expand

AXES = {"train.peak_lr": [1e-3, 2e-3], "model.layers": [2, 3]}
DROPS = {"method": "random_ltd", "full_length_layers": "first", "schedule": {"kind": "constant", "kept": 16}}


def write_sweep(folder: Path, **keys: Any) -> Path:
    """A sweep over a tiny job, whose corpus is never read."""
    if not (folder / "job.yaml").exists():
        tiny_job(folder, ["python"])
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": "job.yaml", "name": "tiny", "axes": AXES, **keys}, sort_keys=False))
    return path


def trials_of(path: Path) -> list[Trial]:
    return expand(load_sweep(path), path)
