"""`tokendrop bench step` runs where nothing but torch, numpy and PyYAML is installed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokendrop.bench.step import _job
from tokendrop.cli.main import main
from tokendrop.config.data import PairsConfig

PLATFORM = Path(__file__).parents[2] / "platform"
LENGTHS = ["1/16", "1/8", "1/4", "1/2", "1/1"]
COMMAND = """
import sys
from importlib.abc import MetaPathFinder

class Forbid(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in {"ray", "mlflow", "pyarrow", "psutil", "tokenizers", "transformers"}:
            raise ModuleNotFoundError(f"{fullname} is not installed here")

sys.meta_path.insert(0, Forbid())
from tokendrop.cli.main import main

main(["bench", "step", "--preset", "gpt-1m", "--micro-batch", "1", "--rounds", "2", "--json"])
"""


def test_it_measures_every_length_beside_its_flops_and_a_plain_gpt():
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, env={"PYTHONPATH": str(PLATFORM)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    check_figures(result, "plain_gpt2")
    assert result["command"].startswith("tokendrop bench step --micro-batch 1 ")


@pytest.mark.long
def test_a_bert_is_timed_beside_hugging_faces(capsys):
    main(["bench", "step", "--preset", "bert-mini", "--micro-batch", "1", "--rounds", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    check_figures(result, "hugging_face_bert")
    shape = _job("bert-mini", 1, "auto", False, torch.device("cpu")).model.shape
    shape = replace(shape, head_tokens=PairsConfig().most_labels(shape.sequence_length))
    quarter, full = (
        shape.flops(kept=kept, dropped_layers=shape.layers - 2)
        for kept in (shape.sequence_length // 4, shape.sequence_length)
    )
    assert result["figures"]["flops_ratio_at_1/4"]["median"] == pytest.approx(quarter / full)


@pytest.mark.long
def test_a_vit_is_timed_beside_timms(capsys):
    main(["bench", "step", "--preset", "vit-ti16", "--micro-batch", "1", "--rounds", "2", "--json"])
    check_figures(json.loads(capsys.readouterr().out), "timm_vit")


def check_figures(result: dict[str, Any], plain: str) -> None:
    kinds = ("step_ms_at", "time_ratio_at", "flops_ratio_at")
    per_length = {f"{kind}_{length}" for kind in kinds for length in LENGTHS}
    figures = {name: figure["median"] for name, figure in result["figures"].items()}
    assert figures.keys() == {*per_length, "time_over_flops_at_quarter", f"{plain}_over_ours", "tokens_per_s_full"}
    assert figures["time_ratio_at_1/1"] == figures["flops_ratio_at_1/1"] == 1
    flops = [figures[f"flops_ratio_at_{length}"] for length in LENGTHS]
    assert flops == sorted(flops)
    assert all(figure > 0 for figure in figures.values())
