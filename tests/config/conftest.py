"""A small job and its base, as files."""

from pathlib import Path

import pytest

BASE = """
name: baseline
model: {kind: gpt, preset: gpt-1m, vocab_size: 512}
data: {corpus: [python]}
train:
  length: 160 steps
  global_batch: 16
  micro_batch: 8
  peak_lr: 2.0e-3
  final_lr: 2.0e-4
  warmup: 10%
"""
JOB = """
base: base.yaml
name: random-ltd
train: {lr_clock: layer_token}
drop:
  method: random_ltd
  schedule: {kind: linear, start: 64, until: 70%, increment: 32}
"""


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid job file with a base beside it; 4 layers, 256 tokens, 160 steps."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "base.yaml").write_text(BASE)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"
