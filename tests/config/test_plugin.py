"""A method of the user's own, in a file or a module."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokendrop.config.load import dump_job, load_job
from tokendrop.errors import UserError
from tokendrop.launch.worker import build_engine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "jobs" / "examples" / "every_other_layer.yaml"


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("at_root")
def test_a_job_drops_by_a_method_that_is_a_file(tmp_path: Path) -> None:
    config = load_job(EXAMPLE, ["model.layers=6"])
    assert config.drop.spans(6) == ((1, 1), (3, 3))
    plan = config.plan()
    assert plan.dropped_layers == (1, 3)
    _, dropping = build_engine(config, torch.device("cpu"))
    assert dropping is not None
    dropping.draw(kept_length=20, step=0, sample_ids=torch.arange(3), sequence_length=128)
    for layer in (1, 3):
        assert dropping.kept(layer)[:, -8:].tolist() == [list(range(120, 128))] * 3
    assert not torch.equal(dropping.kept(1), dropping.kept(3))
    again = tmp_path / "job.yaml"
    again.write_text(dump_job(config))
    assert load_job(again) == config


def test_a_method_may_be_in_a_module_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "jobs" / "examples"))
    config = load_job(EXAMPLE, ["drop.method=every_other_layer:EveryOtherLayer"])
    assert config.drop.spans(4) == ((1, 1),)


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("jobs/examples/none.py:EveryOtherLayer", "drop.method: no file jobs/examples/none.py in "),
        ("no_such_module:Method", "drop.method: can't import no_such_module (ModuleNotFoundError: No module named"),
        ("jobs/examples/every_other_layer.py:Other", "drop.method: want a dataclass Other with a field"),
        ("jobs/examples/every_other_layer.py:Uniform", "drop.method: want a dataclass Uniform with a field 'method'"),
    ],
)
def test_a_method_that_is_not_there_is_named(method: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(EXAMPLE, [f"drop.method={method}"])
    assert said in str(caught.value)


@pytest.mark.usefixtures("at_root")
def test_keys_of_such_a_method_are_checked_like_all_others() -> None:
    with pytest.raises(UserError, match=r"drop\.recnt: unknown key; did you mean 'recent'\?"):
        load_job(EXAMPLE, ["drop.recnt=3"])
    with pytest.raises(UserError, match=r"drop\.recent: want a whole number"):
        load_job(EXAMPLE, ["drop.recent=few"])


def test_a_file_that_fails_as_it_is_imported_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')\n")
    command = [sys.executable, "-m", "tokendrop", "plan", EXAMPLE, "drop.method=broken.py:Broken"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.endswith("drop.method: can't import broken.py (RuntimeError: no luck)\n")
    assert ended.stderr.count("\n") == 1
