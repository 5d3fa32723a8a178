"""Neither workers, micro batches, a resize nor a kill show in what a GPT, BERT or ViT learns, whatever its task."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples import TASKS, write_examples
from folders import Document, write_folder
from groups import together
from images import write_images
from pairs import texts, write_pairs
from sharing import HAS_DEEPSPEED
from task_jobs import ADAPTIVE, LONGER, examples_job, images_job, job
from tiny import TOKENS, assert_same, experiment
from tokendrop.config.experiment import ExperimentConfig
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
GROWN = 64  # tokens of a micro batch: several sequences at a time, fewer as kept lengths grow
TOLERANCES = {"ZeRO 3": 1e-4}  # of float32, and after Adam's steps at rates up to 0.01
CASES = {
    "causal": experiment(evaluate__sequences=13, train__micro_batch=1),
    "decided as it goes": experiment(evaluate__sequences=13, train__micro_batch=1, drop__schedule=ADAPTIVE),
    "decided layer by layer, shared out": job(
        train__strategy="fsdp",
        drop={"method": "random_ltd", "full_length_layers": "none", "by_layer": {"0": LONGER, "1-2": LONGER}},
    ),
    "random-LTD, NSP": job(data__pairs={"sentence_task": "nsp"}),
    "special tokens kept, SOP": job(drop__keep_special_tokens=True),
    "pre-LN, no sentence task, few predictions": job(
        norm="pre", data__pairs={"sentence_task": "none", "max_predictions": 2, "whole_words": False}
    ),
    "shared out": job(train__strategy="fsdp", train__activation_checkpointing=True),
    "token bypass": job(drop__method="token_bypass", drop__special_tokens=[2, 3, 4]),
    "decided, token bypass": job(
        drop__method="token_bypass", drop__special_tokens=[2, 3, 4], drop__schedule=LONGER, model__layers=4
    ),
    "sequence warm-up": job(drop__method="sequence_warmup"),
    "classification": examples_job("pairs"),
    "classification, shared out": examples_job("pairs", norm="pre", train__strategy="fsdp"),
    "regression": examples_job("number"),
    "choices": examples_job("choices", drop={"method": "none"}),
    "images": images_job(),
    "images, [CLS] kept, SGD": images_job(drop__keep_special_tokens=True, train__optimizer="sgd"),
    "images, shared out": images_job(train__strategy="fsdp", train__activation_checkpointing=True),
}
if HAS_DEEPSPEED:
    CASES["ZeRO 3"] = job(train__strategy="deepspeed", train__zero_stage=3, train__precision="fp32")


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
        recorder=Journal(run, rank=rank, world_size=world_size, start=start),
        world_size=world_size,
        decisions=decisions_of(config, run, rank=rank, group=checkpoints.group, start=start),
        scores=scores,
    )
    if world_size > 1 or start:
        warm_up(config, parts, start=start)
    train(config, parts, start=start, stop=stop)


def leg(data: Path, folder: Path, stop: int, micro_batch: int, tokens: int | None = None) -> None:
    """All that the workers of one leg do, with micro batches that grow to so many tokens where layers drop some."""
    DeepSpeedEngine.whole_below = 0  # else no parameter is large enough here for stage 3 to share it out
    for name, config in CASES.items():
        train = replace(config.train, micro_batch=micro_batch, tokens_per_micro_batch=tokens)
        changed = replace(config, train=train)
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same runs by one worker, by one with larger micro batches, by 1, 2 and 4 with ones that grow, and killed."""
    base = tmp_path_factory.mktemp("tasks")
    write_text(base / "data" / "text", 60)
    write_pairs(base / "data" / "sentences", texts(60))
    for kind in TASKS:
        write_examples(base / "data" / kind, kind, 60)
    write_images(base / "data" / "images", 60)
    ways: dict[str, list[tuple[int, ...]]] = {"one": [(1, 6, 1)], "larger": [(1, 6, 4)]}
    ways["resized"] = [(1, 2, 1, GROWN), (2, 4, 1, GROWN), (4, 6, 2)]
    ways["killed"] = [(1, 3, 1), (1, 6, 1)]
    for way, legs in ways.items():
        (base / way).mkdir()
        for workers, stop, *sizes in legs:
            together(workers, leg, base / "data", base / way, stop, *sizes)
            if way == "killed" and stop == 3:
                kill(base / way)
    return {way: base / way for way in ways}


def test_micro_batches_grow_in_the_runs_that_are_resized() -> None:
    for name, config in CASES.items():
        grown = replace(config, train=replace(config.train, tokens_per_micro_batch=GROWN)).plan.segments[0]
        assert 1 < grown.micro_batch <= GROWN // grown.kept_length, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["larger", "resized"])
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


@pytest.mark.parametrize("case", [name for name, config in CASES.items() if config.drop.adaptive])
@pytest.mark.parametrize("way", ["larger", "resized", "killed"])
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
    judged = task.judge(held_out, last["val_loss"], loss.outputs, None)
    if case == "regression":
        assert last["val_figures"] is None or last["val_figures"] == {}
        assert judged["pearson"] == pytest.approx(np.corrcoef(batch.labels_B, loss.outputs[:, 0])[0, 1])
    else:
        hits = loss.outputs.argmax(1) == batch.labels_B
        assert last["val_figures"] == {"accuracy": pytest.approx(hits.double().mean().item())}
        assert judged == {"accuracy": pytest.approx(hits.double().mean().item())}


@pytest.mark.parametrize("case", CASES)
def test_each_sample_is_trained_on_once_by_one_worker(runs, case: str) -> None:
    by_step: dict[str, dict[int, list[int]]] = {}
    for way, folder in runs.items():
        for row in read_ledger(folder / case):
            by_step.setdefault(way, {}).setdefault(row["step"], []).extend(row["sample_ids"])
    orders = [{step: sorted(ids) for step, ids in found.items()} for found in by_step.values()]
    assert all(order == orders[0] for order in orders)
    assert all(len(set(ids)) == 8 for ids in orders[0].values())
