"""Every number of a job, at values that nobody means: a plan or a sentence, soon."""

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tokendrop.cli.plan import plan_result, plan_text
from tokendrop.config.load import dump_job, load_job
from tokendrop.errors import UserError
from tokendrop.launch.memory import check_memory, least_bytes

SOON_S = 8.0  # a few seconds, on a machine that does other things too

KINDS = {
    "fixed": [],
    "chosen": ["scaling.mode=schedule", "scaling.profile=a100-40g-8", "scaling.max_workers=2"],
    "given": ["scaling={mode: schedule, segments: [{from: 0%, workers: 1}, {from: 50%, workers: 2}]}"],
    "mslg": ["drop.schedule={kind: mslg, start: 64, increment: 32, every: 5 steps, full: 200}"],
    "piecewise": [
        "drop={schedule: {kind: piecewise, stages: [{at: 0, kept: 8}, {at: 50%, kept: 99}]},"
        " full_length_layers: [0, -1]}"
    ],
    "bert": [
        "model={kind: bert, layers: 3, width: 64, heads: 2, sequence_length: 64, vocab_size: 300}",
        "task={kind: masked_lm}",
        "data.pairs={max_predictions: 3}",
        "drop.schedule={kind: constant, kept: 32}",
    ],
}
VALUES = [0, -1, math.nan, math.inf, -math.inf, 1e18, -1e18, 1e-300, 2**62, 2**63, 2**40, "", "\0", "\ud800"]
VALUES += [
    "1e18 steps",
    "1e18 tokens",
    "1e30 steps",
    "3 epochs",
    "1e-30%",
    "100%",
    "-1 steps",
    "0 steps",
    True,
    None,
    [],
    {},
]


def numbers(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the numbers and durations below a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, below in items:
        yield from numbers(below, (*path, key))
    is_duration = isinstance(tree, str) and tree.endswith(("steps", "tokens", "%"))
    if is_duration or (isinstance(tree, int | float) and not isinstance(tree, bool)):
        yield path


def planned(path: Path, *overrides: str) -> str | None:
    """Plan a job as the command does; why it is refused, where it is."""
    since = time.monotonic()
    try:
        config = load_job(path, overrides)
        with_prices = {"fixed": config.fixed_plan, "profile": config.scaling.profile}
        plan_result(config.plan, **with_prices)
        plan_text(config.name, config.plan, optimizer=config.train.groups, **with_prices)
        return None
    except UserError as error:
        return str(error)[:600]
    finally:
        assert time.monotonic() - since < SOON_S


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_is_planned_with_or_refused(tmp_path: Path, job: Path, kind: str) -> None:
    tree = yaml.safe_load(dump_job(load_job(job, KINDS[kind])))
    branches = {"fixed": set(tree), "bert": {"model", "drop"}, "mslg": {"drop"}, "piecewise": {"drop"}}
    paths = [path for path in numbers(tree) if path[0] in branches.get(kind, {"scaling"})]
    assert len(paths) > 3
    for path in paths:
        for value in VALUES[:9] if "profile" in path else VALUES:
            changed = copy.deepcopy(tree)
            branch = changed
            for key in path[:-1]:
                branch = branch[key]
            branch[path[-1]] = value
            (tmp_path / "number.yaml").write_text(yaml.safe_dump(changed))
            why = planned(tmp_path / "number.yaml")
            named = [path[-1], path[0], *["data.epoch_samples"] * ("epochs" in str(value))]
            assert why is None or any(str(key) in why for key in named), (path, value)


TOO_MUCH = {
    "scaling.peer_timeout_s=1e18": "scaling: want peer_timeout_s from 1 to 1,000,000, got 1e+18",
    "scaling.lead_s=1e18": "scaling: want lead_s from 0 to 1,000,000, got 1e+18",
    "scaling.patience_s=1e18": "scaling: want patience_s from 0 to 1,000,000, got 1e+18",
    "scaling.cpus_per_worker=1e9": "scaling: want cpus_per_worker of at most 10,000, got 1,000,000,000",
    "scaling.gpus_per_worker=2": "scaling: want gpus_per_worker of 0 to 1, for a worker trains on one GPU; got 2",
    "scaling.max_restarts=1e18": "scaling: want max_restarts of at most 1,000,000, got 1,000,000,000,000,000,000",
    "data.tokenizer_vocab_size=1e18": "data.tokenizer_vocab_size: want at most 1,000,000, got",
    "data.max_document_bytes=1e18": "data.max_document_bytes: want at most 1,099,511,627,776, got",
    "data.rows_per_shard=1e18": "data.rows_per_shard: want at most 68,719,476,736, got",
    "data.shuffle_rows=1e18": "data.shuffle_rows: want at most 68,719,476,736, got",
}


@pytest.mark.parametrize("override", TOO_MUCH)
def test_a_number_that_no_library_takes_is_named_with_its_bound(job: Path, override: str) -> None:
    assert (planned(job, override) or "").startswith(f"{job}: {TOO_MUCH[override]}")


def test_workers_that_share_gpus_do_not_follow_a_plan(job: Path) -> None:
    """For Ray says how much of a node's GPUs is free, not how it lies on them."""
    with pytest.raises(UserError, match=r"scaling: mode 'schedule' wants gpus_per_worker of 0 or 1, got 0\.5$"):
        load_job(job, ["scaling={mode: schedule, gpus_per_worker: 0.5}"])
    load_job(job, ["scaling={mode: fixed, gpus_per_worker: 0.5}"])


LONG = ("model.sequence_length=1e9", "train.length=1e18 steps")


@pytest.mark.parametrize("schedule", ["kind: linear, until: 100%", "kind: mslg, every: 1 steps"])
def test_more_kept_lengths_than_can_be_laid_out_are_refused(job: Path, schedule: str) -> None:
    why = planned(job, *LONG, f"drop.schedule={{{schedule}, start: 1, increment: 1}}") or ""
    assert why.startswith(
        f"{job}: drop.schedule: want at most 50,000 changes in a run of what layers keep; want larger"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "model.sequence_length=4096",
            "train.length=1e6 steps",
            "drop.schedule={kind: mslg, start: 1, increment: 1, every: 1}",
        ),
        ("drop.schedule={kind: linear, start: 1, until: 100%, increment: 2}",),
    ],
)
def test_more_workers_and_kept_lengths_than_can_be_compared_are_refused(job: Path, overrides: tuple[str, ...]) -> None:
    many = ("train.global_batch=2205403200", "train.micro_batch=1", "scaling.max_workers=100000")
    why = planned(
        job, "train.length=1e6 steps", *overrides, *many, "scaling.mode=schedule", "scaling.profile=a100-40g-8"
    )
    assert why is not None
    assert "kept lengths are too many to choose from; want min_workers and max_workers closer together" in why


@pytest.mark.parametrize(
    "override",
    ["model.width=1e6", "model.width=1e18", "model.vocab_size=1e15", "model.layers=9999", "model.sequence_length=1e12"],
)
def test_a_model_that_no_memory_holds_can_be_planned_and_not_trained(
    job: Path, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_job(job, [override, *(["model.width=8192"] if "layers" in override else [])])
    have = psutil.virtual_memory().total
    with pytest.raises(
        UserError, match=rf"^model: .* parameters .* want .*B of memory .* this machine has {have / 1e9:.2g}"
    ):
        check_memory(config)


def test_a_model_is_counted_once_for_each_worker(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_job(job, ["model.width=4096", "scaling.workers=2"])
    each = 4 * 4 * config.model.shape.parameters + 4 * config.train.micro_batch * config.model.sequence_length * 4096

    class Machine:
        total = 2 * each

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    check_memory(config)
    Machine.total -= 1
    with pytest.raises(UserError, match="for 2 workers"):
        check_memory(config)
    halves = load_job(job, ["model.width=4096", "scaling.workers=2", "train.tensor_parallel=2"])
    assert least_bytes(halves, workers=2) < 0.6 * least_bytes(config, workers=2)
    check_memory(load_job(job, ["model.width=4096", "scaling.workers=2", "scaling.gpus_per_worker=1"]))
    check_memory(load_job(job, ["model.width=4096", "scaling.workers=2", "train.strategy=fsdp"]))
