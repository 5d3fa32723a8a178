"""What a DeepSpeed config has that a job has not is named, or refused in one sentence; the rest can be planned."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_configs import AT, imported, put, theirs
from tokendrop.cli.main import main
from tokendrop.config.deepspeed import PRESETS
from tokendrop.config.load import load_job
from tokendrop.errors import UserError


def leaves(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))


@pytest.mark.parametrize("branch", ["", "optimizer__params", "zero_optimization", "LTD", "LTD__random_ltd_schedule"])
def test_what_nobody_asks_for_is_named_once(tmp_path: Path, branch: str) -> None:
    _, before = imported(tmp_path, theirs())
    key = f"{branch}__new_key".removeprefix("__")
    for value in (5, {"below": {"it": 1}}, [1], "text"):
        _, notes = imported(tmp_path, theirs(**{key: value}))
        (added,) = set(notes) - set(before)
        assert added == f"{key.replace('LTD', AT).replace('__', '.')}: no counterpart; left out"
        assert len(notes) == len(before) + 1


def test_what_deepspeed_itself_passes_over_is_named(tmp_path: Path) -> None:
    _, before = imported(tmp_path, theirs(LTD__global_batch_size=64, LTD__micro_batch_size=4))
    config, notes = imported(tmp_path, theirs(LTD__global_batch_size=32, LTD__micro_batch_size=4))
    assert set(notes) - set(before) == {
        f"{AT}.global_batch_size: 32; DeepSpeed takes train_batch_size=64, and so does this job"
    }
    assert config.train.global_batch == 64
    _, outer = imported(tmp_path, theirs(data_efficiency__enabled=False, train_batch_size="auto"))
    assert "data_efficiency.enabled: not true; DeepSpeed drops tokens all the same, and so does this job" in outer
    assert "train_batch_size: 'auto', which counts as not given" in outer


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no random-LTD": ({"data_efficiency": None}, f"{AT}: want this branch, which configures random-LTD; found none"),
    "switched off": ({"LTD__enabled": False}, f"{AT}.enabled: want true, or this config drops no token"),
    "another type": (
        {"LTD__random_ltd_schedule__schedule_type": "fixed_root"},
        f"{AT}.random_ltd_schedule.schedule_type: ",
    ),
    "no token": (
        {"LTD__random_ltd_schedule__min_value": 7},
        f"{AT}.random_ltd_schedule: with min_value=7 below seq_per_step=8 DeepSpeed keeps no token at first; want",
    ),
    "upside down": (
        {"LTD__random_ltd_schedule__min_value": 65},
        f"{AT}.random_ltd_schedule: want 1 <= min_value <= max",
    ),
    "missing": ({"LTD__total_layer_num": None}, f"{AT}.total_layer_num: this key is needed and missing"),
    "no number": (
        {"LTD__total_layer_num": "many"},
        f'{AT}.total_layer_num: want a whole number of at least 1, got "many"',
    ),
    "too few layers": (
        {"LTD__random_ltd_layer_num": 9},
        f"{AT}.random_ltd_layer_num: is 9, but random_ltd_layer_id has 10",
    ),
    "no such layer": (
        {"LTD__random_ltd_layer_id": [12]},
        f"{AT}.random_ltd_layer_id: want different numbers of layers",
    ),
    "twice": ({"LTD__random_ltd_layer_id": [1] * 10}, f"{AT}.random_ltd_layer_id: want different numbers of layers"),
    "another kind": ({"LTD__model_type": "both"}, f"{AT}.model_type: want decoder or encoder, got 'both'"),
    "no model": ({"LTD__total_layer_num": 13}, f"{AT}.total_layer_num: no model of ours has 13; want --model"),
    "optimizer": (
        {"optimizer__type": "Lamb"},
        "optimizer.type: want Adam, AdamW or SGD, which have a counterpart; got 'Lamb'",
    ),
    "no batch": (
        {"train_batch_size": None, "train_micro_batch_size_per_gpu": None},
        "train_batch_size: want this or train_micro_batch_size_per_gpu, in sequences; found neither",
    ),
    "uneven": ({"train_batch_size": 62}, "train_batch_size: want a multiple of micro batch 4 x 2 accumulated, got 62"),
    "ZeRO": ({"zero_optimization__stage": 4}, "zero_optimization.stage: want 0, 1, 2 or 3, got 4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_the_same_is_one_sentence(tmp_path: Path, what: str, complaint) -> None:
    changes, expected = REFUSED[what]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(theirs(**changes)))
    assert complaint("import", "deepspeed", path).startswith(f"{path}: {expected}")


def test_files_that_are_no_config_are_one_sentence(tmp_path: Path, complaint) -> None:
    path, said = tmp_path / "ds.json", "want JSON, as DeepSpeed reads it"
    for text, expected in (
        ("{'a': 1}", f"{said}; line 1, column 2: "),
        ("[1]", 'want a JSON object with keys such as "train_batch_size", got a list'),
        ('{"a": NaN}', f"{said} (NaN is no number)"),
        ('{"a": 1, "a": 2}', f"{said} ('a' stands twice)"),
        ("[" * 100_000, said),
    ):
        path.write_text(text)
        assert complaint("import", "deepspeed", path).startswith(f"{path}: {expected}")
    assert complaint("import", "deepspeed", tmp_path / "none.json").endswith("(No such file or directory)")
    path.write_text(json.dumps(theirs()))
    assert complaint("import", "deepspeed", path, "--model", "gpt-9t").startswith(
        f"{path}: --model: want one of gpt-1m, "
    )
    assert complaint("import", "deepspeed", path, "--output", path).startswith(
        "--output: want a new .yaml file in a folder"
    )


ODD = [0, -1, 1.5, 1e30, True, "auto", "", [], {}, [{}], {"enabled": "yes"}, "x" * 300]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*leaves(theirs())]), st.sampled_from(ODD), st.sampled_from([None, *PRESETS]))
def test_whatever_stands_there_is_a_job_or_one_sentence(
    tmp_path: Path, keys: tuple[str, ...], value: Any, preset: str | None
) -> None:
    tree = copy.deepcopy(theirs())
    put(tree, [*keys], value)
    said = ""
    try:
        imported(tmp_path, tree, preset)
    except UserError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_what_it_writes_can_be_planned(tmp_path: Path, preset: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = tmp_path / "ds.json", tmp_path / "job.yaml"
    kind = "encoder" if preset and preset.startswith("bert") else "decoder"
    path.write_text(json.dumps(theirs(LTD__model_type=kind)))
    main(["import", "deepspeed", str(path), "--output", str(job), *(["--model", preset] if preset else [])])
    told = capsys.readouterr()
    assert told.out == f"{job}   next: tokendrop plan {job}\n"
    assert "note     zero_optimization.overlap_comm: no counterpart; left out\n" in told.err
    main(["plan", str(job), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["global_batch"]) == (150, 64)
    assert load_job(job).model.layers == 12
    main(["import", "deepspeed", str(path), *(["--model", preset] if preset else [])])
    assert capsys.readouterr().out == job.read_text()
