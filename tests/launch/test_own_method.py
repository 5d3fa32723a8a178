"""A method of the user's own trains on workers, which do not have its file."""

from pathlib import Path

import pytest

from corpora import documents, tiny_job, write_corpus
from tokendrop.config.load import load_job
from tokendrop.launch.trainer import run_training

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

EXAMPLE = Path(__file__).parents[2] / "jobs" / "examples" / "every_other_layer.py"


def test_a_run_drops_by_a_file_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text())
    drop = {"method": "mine.py:EveryOtherLayer", "schedule": {"kind": "constant", "kept": 8}, "recent": 3}
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    config = load_job(tiny_job(tmp_path, [corpus], drop=drop, model={"layers": 4}, scaling={"workers": 2}))
    result = run_training(config)
    assert result["steps"] == 2
    assert result["layer_tokens"] == 2 * 4 * (3 * 32 + 8)
    load_job(Path(result["run"]) / "job.yaml")
