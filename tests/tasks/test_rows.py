"""What tasks read rows by."""

from pathlib import Path

import pytest

from examples import TASKS, write_examples
from images import write_images
from pairs import texts, write_pairs
from task_jobs import CASES
from tokendrop.data.read.row_reader import MappedSamples


@pytest.mark.parametrize("case", ["random-LTD, NSP", "classification", "images"])
def test_workers_wait_for_the_rows_of_whole_steps(tmp_path: Path, case: str) -> None:
    """For those of their own alone, some would wait in a collective for others that wait for preparation."""
    config = CASES[case]
    match config.task.kind:
        case "masked_lm":
            write_pairs(tmp_path, texts(60))
        case "text_classification":
            write_examples(tmp_path, next(iter(TASKS)), 60)
        case _:
            write_images(tmp_path, 60)
    samples = config.task.build(config).open(tmp_path, tokenizer=tmp_path / "tokenizer.json").samples
    assert isinstance(samples, MappedSamples)
    assert samples.together == config.train.global_batch > 1
