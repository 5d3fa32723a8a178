"""GLUE's metrics are what their definitions say, each task has its own, and its files are read by its preset."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertTokenizerFast

from corpora import tiny_job
from tokendrop.config.load import load_job
from tokendrop.config.task import Metric, TextClassification
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.example_rows import read_examples
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.format import Split
from tokendrop.tasks.text_classification import score

PAPER = Path(__file__).parents[2] / "jobs" / "paper"
TOLERANCE = 1e-9
GLUE: dict[str, tuple[Metric, ...]] = {
    "mnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "cola": ("matthews_correlation",),
    "stsb": ("pearson", "spearman"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
}
"""Table 1 of Wang et al. 2019, arXiv:1804.07461."""


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; NaN where one of them is constant."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    under = math.sqrt(sum((a - x) ** 2 for a in xs)) * math.sqrt(sum((b - y) ** 2 for b in ys))
    return over / under if len({*xs}) > 1 and len({*ys}) > 1 else math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal ones share the mean of theirs."""
    return [sum(one < value for one in values) + (values.count(value) + 1) / 2 for value in values]


def pairs_of(elements: st.SearchStrategy, *, least: int = 1) -> st.SearchStrategy[tuple[list, list]]:
    """Labels, and as many predictions; often all of them are alike."""

    def both(count: int) -> st.SearchStrategy[tuple[list, list]]:
        several = st.lists(elements, min_size=count, max_size=count) | elements.map(lambda one: [one] * count)
        return st.tuples(several, several)

    return st.integers(least, 40).flatmap(both)


def scored(metric: Metric, labels: Sequence[float], found: Sequence[float]) -> float:
    """As `judge` calls it."""
    return score(metric, np.array(labels), np.array(found, np.float64))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning", "ignore:A single label was found")
@given(pairs_of(st.integers(0, 1)))
def test_of_two_labels_accuracy_f1_and_matthews_are_those_of_their_counts(case: tuple[list[int], list[int]]) -> None:
    (tn, fn), (fp, tp) = ([[*zip(*case, strict=True)].count((label, found)) for label in (0, 1)] for found in (0, 1))
    under = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert scored("accuracy", *case) == pytest.approx((tp + tn) / (tp + tn + fp + fn), abs=TOLERANCE)
    assert scored("f1", *case) == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp else 0, abs=TOLERANCE)
    matthews = (tp * tn - fp * fn) / under if under else 0
    assert scored("matthews_correlation", *case) == pytest.approx(matthews, abs=TOLERANCE)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(pairs_of(st.integers(0, 3)))
def test_of_several_labels_they_are_those_of_a_table_of_confusions(case: tuple[list[int], list[int]]) -> None:
    labels, found = (np.eye(4)[numbers] for numbers in case)
    hits, count = (labels * found).sum(), len(labels)
    assert scored("accuracy", *case) == pytest.approx(hits / count, abs=TOLERANCE)
    of_label, of_found = labels.sum(0), found.sum(0)
    under = math.sqrt((count**2 - of_label @ of_label) * (count**2 - of_found @ of_found))
    matthews = (hits * count - of_label @ of_found) / under if under else 0
    assert scored("matthews_correlation", *case) == pytest.approx(matthews, abs=TOLERANCE)


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
@given(pairs_of(st.integers(-20, 20).map(lambda quarters: quarters / 4), least=2))
def test_pearson_is_the_correlation_of_numbers_and_spearman_that_of_their_ranks(
    case: tuple[list[float], list[float]],
) -> None:
    assert scored("pearson", *case) == pytest.approx(correlation(*case), abs=TOLERANCE, nan_ok=True)
    assert scored("spearman", *case) == pytest.approx(correlation(*map(ranks, case)), abs=TOLERANCE, nan_ok=True)


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_one_example_and_a_model_that_diverged_have_no_correlation(metric: Metric) -> None:
    assert math.isnan(scored(metric, [1.5], [2.0]))
    assert math.isnan(scored(metric, [1.5, 2.5, 3.0], [math.nan] * 3))


@pytest.mark.parametrize("task", GLUE)
def test_the_papers_jobs_are_judged_by_glues_metrics_of_their_task(task: str) -> None:
    form = load_job(PAPER / f"bert_large_{task}.yaml").task
    assert isinstance(form, TextClassification)
    assert form.preset == task
    assert form.metrics == GLUE[task]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_files_of_cola_are_read_by_its_preset(tmp_path: Path, real_data: Path) -> None:
    """GLUE's own files have no header: the columns are named beside the preset."""
    cola, vocabulary = real_data / "glue" / "cola", real_data / "bert_vocab" / "vocab.txt"
    length = 64
    if not cola.is_dir():
        pytest.skip(f"no CoLA below {real_data}")
    job = tiny_job(
        tmp_path,
        [cola / "train.tsv"],
        model={"kind": "bert", "sequence_length": length, "vocab_size": 30592},
        data={"validation_corpus": [str(cola / "dev.tsv")], "tokenizer": str(vocabulary), "tsv_header": False},
        task={"kind": "text_classification", "preset": "cola", "texts": ["3"], "label": "1"},
    )
    config = load_job(job)
    assert isinstance(config.task, TextClassification)
    assert config.task.metrics == GLUE["cola"]
    folder, theirs = prepare(config), BertTokenizerFast(str(vocabulary))
    files: dict[Split, str] = {"train": "train.tsv", "validation": "dev.tsv"}
    for split, name in files.items():
        lines = [line.split("\t") for line in (cola / name).read_text().splitlines()]
        rows = Rows(folder, split)
        assert rows.committed.rows == (len(lines),)
        found = read_examples(rows.read(np.arange(len(lines))), length)
        assert found.labels_B.tolist() == [int(line[1]) for line in lines]
        texts = theirs([line[3] for line in lines], truncation=True, max_length=length, padding="max_length")
        assert found.input_ids_BCS[:, 0].tolist() == texts["input_ids"]
