"""A method and a task of the user's own train on workers, which do not have their files."""

from pathlib import Path

import pytest

from corpora import documents, tiny_job, write_corpus
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch.resume import check_goes_on
from tokendrop.launch.trainer import run_training
from tokendrop.track.run_folder import open_run_folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"


def test_a_run_drops_and_reads_by_files_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((EXAMPLES / "every_other_layer.py").read_text())
    (tmp_path / "turned.py").write_text((EXAMPLES / "right_to_left.py").read_text())
    drop = {"method": "mine.py:EveryOtherLayer", "schedule": {"kind": "constant", "kept": 8}, "recent": 3}
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    more: dict[str, dict[str, object]] = {"task": {"kind": "turned.py:RightToLeft"}, "scaling": {"workers": 2}}
    config = load_job(tiny_job(tmp_path, [corpus], drop=drop, model={"layers": 4}, **more))
    result = run_training(config)
    assert result["steps"] == 2
    assert result["layer_tokens"] == 2 * 4 * (3 * 32 + 8)
    run = Path(result["run"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("TOKENDROP_RUN_COPIES", "1")
    again, _ = open_run_folder(run)
    assert again.drop.spans(4) == ((1, 1),)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    with pytest.raises(UserError, match=r"drop\.method: mine\.py has changed since .* began; want it as it was, in"):
        check_goes_on(config, run)
