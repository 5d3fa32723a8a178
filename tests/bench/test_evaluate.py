"""`tokendrop bench evaluate`: both adapters answer alike, and all its figures are there."""

import json
from pathlib import Path

import pytest

from corpora import documents
from tokendrop.bench.evaluate import best_size, differences, speeds
from tokendrop.cli.main import main
from tokendrop.data.tokenizer import train_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(iter(documents(50)), vocab_size=512).save(str(path))
    return path


@pytest.mark.long
def test_both_adapters_answer_alike_at_sizes_of_their_own(tmp_path: Path, tokenizer: Path, capsys):
    ends = {"choice1": "It rained.", "choice2": "It was dry.", "question": "cause", "label": 0}
    copa = [{"premise": f"Bird {number} sings under the stone.", **ends} for number in range(3)]
    (tmp_path / "data" / "copa").mkdir(parents=True)
    (tmp_path / "data" / "copa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copa))

    data = ["--task-data", str(tmp_path / "data"), "--tokenizer", str(tokenizer)]
    main(["bench", "evaluate", *data, "--preset", "gpt-1m", "--rounds", "1", "--json"])

    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["largest_difference"]["median"] < 1e-3
    assert figures["unlike_greedy_answers"] == {"median": 0, "min": 0, "max": 0, "unit": "of 6"}
    assert {"over_lm_eval", "copa_over_lm_eval", "copa_best_size_ours", "copa_best_size_theirs"} <= set(figures)


def test_it_takes_the_fastest_batch_size_and_stops_at_a_slower_one():
    class Adapter:
        def __init__(self, size: int) -> None:
            self.size = size
            made.append(size)

        def loglikelihood(self, asked, disable_tqdm):
            now[0] += len(asked) * {1: 3.0, 4: 1.0, 16: 2.0}[self.size]

    made: list[int] = []
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokendrop.bench.evaluate.time.perf_counter", lambda: now[0])
        assert best_size(Adapter, [1, 4, 16, 64], [None] * 5) == 4
    assert 64 not in made


def test_the_speed_is_that_of_all_requests_together_not_the_mean_of_ratios():
    seconds = {"a ours": [1.0], "a theirs": [2.0], "b ours": [9.0], "b theirs": [9.0]}

    found = speeds(seconds, {"a": 10, "b": 10})

    assert found["over_lm_eval"]["median"] == pytest.approx(1.1)
    assert found["a_over_lm_eval"]["median"] == 2
    assert found["a_requests_per_s"]["median"] == 10
    assert differences([(-1.0, True), (-2.0, False)], [(-1.5, True), (-2.0, True)]) == {
        "largest_difference": {"median": 0.5, "min": 0.5, "max": 0.5, "unit": "nats"},
        "unlike_greedy_answers": {"median": 1, "min": 1, "max": 1, "unit": "of 2"},
    }
