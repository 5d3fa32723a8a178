"""DeepSpeed configs with random_ltd, and what is made of them."""

import json
from pathlib import Path
from typing import Any

import yaml

from tokendrop.config.deepspeed import job_of
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build

AT = "data_efficiency.data_routing.random_ltd"


def theirs(**changes: Any) -> dict[str, Any]:
    """A whole config of DeepSpeed's; `changes` are dotted keys with `__` for the dots, None for a key left out."""
    schedule = {"min_value": 16, "max_value": 64, "schedule_type": "fixed_linear"}
    schedule |= {"schedule_config": {"require_steps": 100, "seq_per_step": 8}}
    ltd: dict[str, Any] = {"enabled": True, "total_layer_num": 12, "random_ltd_layer_num": 10}
    ltd |= {"random_ltd_layer_id": [*range(1, 11)], "model_mask_name": "attention_mask", "model_type": "decoder"}
    ltd |= {"hidden_state_order": "batch_seq_dim", "layer_token_lr_schedule": {"enabled": False}}
    tree: dict[str, Any] = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": 0.2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 150}},
        "data_efficiency": {
            "enabled": True,
            "seed": 7,
            "data_routing": {"enabled": True, "random_ltd": {**ltd, "random_ltd_schedule": schedule}},
        },
    }
    for dotted, value in changes.items():
        put(tree, dotted.replace("LTD", AT.replace(".", "__")).split("__"), value)
    return tree


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *branches, leaf = keys
    for key in branches:
        tree = tree.setdefault(key, {})
    if value is None:
        tree.pop(leaf, None)
    else:
        tree[leaf] = value


def imported(folder: Path, tree: Any, preset: str | None = None) -> tuple[ExperimentConfig, list[str]]:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(tree))
    job, notes = job_of(path, preset=preset)
    assert [f"# {note}" for note in notes] == job.splitlines()[1 : 1 + len(notes)]
    return build(ExperimentConfig, yaml.safe_load(job), ""), notes
