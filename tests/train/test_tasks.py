"""Neither workers, micro batches, a resize nor a kill show in what a GPT, BERT or ViT learns, whatever its task."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples import TASKS, write_examples
from folders import Document, write_folder
from groups import together
from images import write_images
from pairs import texts, write_pairs
from task_jobs import CASES, IN_GROUPS, METHODS
from tiny import TOKENS, assert_same
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import ScalingConfig
from tokendrop.config.task import CausalLm, ImageClassification, TextClassification
from tokendrop.data.read.batches import MicroBatches
from tokendrop.launch.decisions import decisions_of
from tokendrop.track.decisions import read_decisions
from tokendrop.track.journal import Journal, read_ledger, read_steps
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_name
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.loop import TrainComponents, train
from tokendrop.train.reader import load_weights
from tokendrop.train.warm_up import warm_up
from tokendrop.train.worker import build_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FLOAT64 = 1e-10
GROWN = (
    64  # tokens of a micro batch, for each sequence of a sample: several samples at a time, fewer as kept lengths grow
)
TOLERANCES = {"ZeRO 3": 1e-4}  # of float32, and after Adam's steps at rates up to 0.01
WAYS: dict[str, list[tuple[int, ...]]] = {
    "one": [(1, 6, 1)],
    "larger": [(1, 6, 4)],
    "resized": [(1, 2, 1, GROWN), (2, 4, 1, GROWN), (4, 6, 2)],
    "killed": [(1, 3, 1), (1, 6, 1)],
    "tensor parallel": [(2, 2, 1), (4, 5, 2), (1, 6, 4)],
    "context parallel": [(2, 2, 1), (4, 5, 2), (1, 6, 4)],
}
"""Workers, the step that they train to, and sizes of micro batches, one leg after the other."""
GROUPS = {"tensor parallel": {"tensor_parallel": 2}, "context parallel": {"context_parallel": 2}}
"""How workers train a micro batch together, by way."""


def runs_in(case: str, way: str) -> bool:
    """Whether a case is trained in a way."""
    return way not in GROUPS or case in IN_GROUPS or (case == "ZeRO 3" and way == "context parallel")


def train_until(config: ExperimentConfig, data: Path, run: Path, stop: int) -> None:
    """What a worker does: from the last checkpoint of a run to a step; warmed up, but for one worker's first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run.mkdir(exist_ok=True)
    engine, dropping = build_engine(config, torch.device("cpu"))
    scores = config.drop.scores(config.model.vocab_size)
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=9, meta={}, scores=scores)
    newest = checkpoints.newest()
    start = checkpoints.load(engine, newest) if newest else 0
    opened = config.task.build(config).open(data)
    split = replace(config.plan.batch, world_size=world_size)
    parts = TrainComponents(
        engine=engine,
        dropping=dropping,
        batches=MicroBatches(opened.batch, train=opened.samples, validation=opened.held_out(), split=split, rank=rank),
        checkpoints=checkpoints,
        recorder=Journal(run, rank=rank, world_size=world_size, group=config.train.group, start=start),
        world_size=world_size,
        decisions=decisions_of(config, run, rank=rank, group=checkpoints.group, start=start),
        scores=scores,
    )
    if world_size > 1 or start:
        warm_up(config, parts, start=start)
    train(config, parts, start=start, stop=stop)


def leg(data: Path, folder: Path, way: str, stop: int, micro_batch: int, tokens: int | None = None) -> None:
    """All that the workers of one leg do, with micro batches that grow to so many tokens where layers drop some."""
    group = GROUPS.get(way, {}) if dist.get_world_size() > 1 else {}
    DeepSpeedEngine.whole_below = 0  # else no parameter is large enough here for stage 3 to share it out
    scaling = ScalingConfig(workers=max([1, *group.values()]))
    for name, config in CASES.items():
        if not runs_in(name, way):
            continue
        most = tokens and tokens * config.task.sequences_per_sample
        train = replace(config.train, micro_batch=micro_batch, tokens_per_micro_batch=most, **group)
        changed = replace(config, train=train, scaling=scaling)
        train_until(changed, data_of(changed, data), folder / name, stop)


def data_of(config: ExperimentConfig, data: Path) -> Path:
    """The folder of a job's token shards."""
    task = config.task
    if isinstance(task, CausalLm):
        return data / "text"
    if isinstance(task, ImageClassification):
        return data / "images"
    if not isinstance(task, TextClassification):
        return data / "sentences"
    return data / ("choices" if task.choices else "pairs" if task.labels else "number")


def write_text(folder: Path, count: int) -> None:
    """Rows of random tokens as training rows, and the same again as validation rows."""
    rows = np.random.default_rng(0).integers(0, 50, (count, TOKENS + 1)).tolist()
    documents = [Document(row, split=split) for split in ("train", "validation") for row in rows]
    write_folder(folder, [("corpus", documents)], sequence_length=TOKENS, vocab_size=50)


def kill(base: Path) -> None:
    """Runs lose what they trained since the checkpoint before their last, as by a kill before that is committed."""
    for name in CASES:
        shutil.rmtree(committed(base / name / CHECKPOINTS)[-1])


class Runs(dict[str, Path]):
    """Folders with a run of each case, by way; trained when they are first asked for."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, way: str) -> Path:
        folder = self[way] = self.base / way
        folder.mkdir()
        for workers, stop, *sizes in WAYS[way]:
            together(workers, leg, self.base / "data", folder, way, stop, *sizes)
            if way == "killed" and stop == 3:
                kill(folder)
        return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    base = tmp_path_factory.mktemp("tasks")
    write_text(base / "data" / "text", 60)
    write_pairs(base / "data" / "sentences", texts(60))
    for kind in TASKS:
        write_examples(base / "data" / kind, kind, 60)
    write_images(base / "data" / "images", 60)
    return Runs(base)


def in_ways(*ways: str) -> list[Any]:
    """Each case in each of these ways that it can be trained in."""
    long = pytest.mark.long
    return [
        pytest.param(case, way, marks=[long] if way in GROUPS else [])
        for case in CASES
        for way in ways
        if runs_in(case, way)
    ]


def test_micro_batches_grow_in_the_runs_that_are_resized() -> None:
    for name, config in CASES.items():
        if name in METHODS:
            continue
        tokens = GROWN * config.task.sequences_per_sample
        grown = replace(config, train=replace(config.train, tokens_per_micro_batch=tokens)).plan.segments[0]
        assert 1 < grown.micro_batch <= GROWN // grown.kept_length, name


@pytest.mark.parametrize(("case", "way"), in_ways("larger", "resized", *GROUPS))
def test_losses_and_weights_are_those_of_one_worker(runs, case: str, way: str) -> None:
    expected, found = (read_steps(runs[one] / case) for one in ("one", way))
    for key in ("loss", "grad_norm", "val_loss"):
        values = [[row[key] for row in rows if row[key] is not None] for rows in (expected, found)]
        np.testing.assert_allclose(values[1], values[0], rtol=TOLERANCES.get(case, FLOAT64))
        assert len(values[0]) == (2 if key == "val_loss" else 6)
    figures = [[row["val_figures"] or {} for row in rows if row["val_loss"] is not None] for rows in (expected, found)]
    assert figures[1] == [pytest.approx(one, rel=TOLERANCES.get(case, FLOAT64)) for one in figures[0]]
    weights = [weights_of(CASES[case], runs[one] / case) for one in ("one", way)]
    assert_same(*weights, tolerance=TOLERANCES.get(case, FLOAT64))


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_that_goes_on_is_an_uninterrupted_one_bit_for_bit(runs, case: str) -> None:
    whole, killed = (runs[way] / case for way in ("one", "killed"))
    for key in ("step", "loss", "grad_norm", "val_loss", "val_figures"):
        assert [row[key] for row in read_steps(killed)] == [row[key] for row in read_steps(whole)]
    assert_same(*(weights_of(CASES[case], run) for run in (whole, killed)))
    assert read_ledger(killed) == read_ledger(whole)
    assert step_name(2) in [path.name for path in committed(killed / CHECKPOINTS)]


@pytest.mark.parametrize(
    ("case", "way"),
    [one for one in in_ways("larger", "resized", "killed", *GROUPS) if CASES[one.values[0]].drop.adaptive],
)
def test_decisions_are_those_of_one_worker_and_made_once(runs, case: str, way: str) -> None:
    expected, found = (read_decisions(runs[one] / case) for one in ("one", way))
    assert found.keys() == expected.keys() == CASES[case].drop.adaptive.keys()
    for key, decisions in expected.items():
        assert [(one.step, one.kept_length) for one in found[key]] == [(one.step, one.kept_length) for one in decisions]
        gaps = [[one.gap for one in some if one.gap is not None] for some in (decisions, found[key])]
        np.testing.assert_allclose(gaps[1], gaps[0], rtol=1e-6)
        assert gaps[0]
        assert [one.step for one in decisions] == [1, 2, 3, 4, 5]


def weights_of(config: ExperimentConfig, run: Path) -> dict[str, torch.Tensor]:
    model = config.task.build(config).build_model(seed=0).double()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.named_parameters())


@pytest.mark.parametrize("case", [name for name, config in CASES.items() if config.task.kind == "masked_lm"])
def test_figures_are_those_of_the_validation_rows_all_at_once(runs, case: str) -> None:
    config, run = CASES[case], runs["one"] / case
    task = config.task.build(config)
    opened = task.open(run.parent.parent / "data" / "sentences")
    model = task.build_model(seed=0).double().eval()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    with torch.no_grad():
        batch = opened.batch(*opened.held_out(), 0)
        loss = model(batch)
        hidden = model.hidden(batch.input_ids_BS, batch.token_types_BS, batch.attention_mask_BS)
        is_label_BS = batch.labels_BS >= 0
        hits = model.token_logits(hidden).argmax(-1)[is_label_BS] == batch.labels_BS[is_label_BS]
    last = read_steps(run)[-1]
    tolerance = TOLERANCES.get(case, FLOAT64)
    assert last["val_loss"] == pytest.approx(loss.mean.item(), rel=tolerance)
    assert last["val_figures"]["mlm_accuracy"] == pytest.approx(hits.double().mean().item(), rel=tolerance)
    mlm = loss.token_losses_BS.sum() / is_label_BS.sum()
    assert last["val_figures"]["mlm_loss"] == pytest.approx(mlm.item(), rel=tolerance)
    sentence_task = config.data.pairs.sentence_task
    if sentence_task == "none":
        assert last["val_figures"].keys() == {"mlm_loss", "mlm_accuracy"}
    else:
        likely_B = model.sentence_logits(hidden).argmax(-1) == batch.sentence_labels_B
        accuracy = last["val_figures"][f"{sentence_task}_accuracy"]
        assert accuracy == pytest.approx(likely_B.double().mean().item(), rel=tolerance)


@pytest.mark.parametrize("case", ["classification", "choices", "regression", "images"])
def test_a_classifiers_figures_are_those_of_the_validation_examples_all_at_once(runs, case: str) -> None:
    config, run = CASES[case], runs["one"] / case
    task = config.task.build(config)
    opened = task.open(data_of(config, run.parent.parent / "data"))
    model = task.build_model(seed=0).double().eval()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    held_out = opened.held_out()
    batch = opened.batch(*held_out, 0)
    with torch.no_grad():
        loss = task.loss(model, batch)
    last = read_steps(run)[-1]
    assert last["val_loss"] == pytest.approx(loss.mean.item(), rel=FLOAT64)
    if case == "images":
        logits = model.logits(batch.pixels_BCYX)
        hits = (logits.argmax(1) == batch.labels_B).double().mean().item()
        assert last["val_figures"] == {"top1": pytest.approx(hits), "top5": 1.0}  # of three classes
        return
    judged = opened.judge("validation", last["val_loss"], loss.outputs, None)
    if case == "regression":
        assert last["val_figures"] is None or last["val_figures"] == {}
        assert judged["pearson"] == pytest.approx(np.corrcoef(batch.labels_B, loss.outputs[:, 0])[0, 1])
    else:
        hits = loss.outputs.argmax(1) == batch.labels_B
        assert last["val_figures"] == {"accuracy": pytest.approx(hits.double().mean().item())}
        assert judged == {"accuracy": pytest.approx(hits.double().mean().item())}


@pytest.mark.parametrize(("case", "way"), in_ways(*WAYS))
def test_each_sample_is_trained_on_once_by_one_worker(runs, case: str, way: str) -> None:
    expected, found = (samples_by_step(runs[one] / case) for one in ("one", way))
    assert found == expected
    assert all(len(set(ids)) == 8 for ids in found.values())


def samples_by_step(run: Path) -> dict[int, list[int]]:
    """What all workers together trained on."""
    by_step: dict[int, list[int]] = {}
    for row in read_ledger(run):
        by_step.setdefault(row["step"], []).extend(row["sample_ids"])
    return {step: sorted(ids) for step, ids in by_step.items()}
