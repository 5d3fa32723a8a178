"""A method of the user's own, in a file or a module."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import experiment
from tokendrop.config.drop import DropMethod
from tokendrop.config.load import dump_job, load_job
from tokendrop.config.plugin import content_of, loaded_here, named_class
from tokendrop.errors import UserError
from tokendrop.train.worker import build_engine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "jobs" / "examples" / "every_other_layer.yaml"
TASK = ROOT / "jobs" / "examples" / "right_to_left.yaml"


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("at_root")
def test_a_job_drops_by_a_method_that_is_a_file(tmp_path: Path) -> None:
    config = load_job(EXAMPLE, ["model.layers=6"])
    assert config.drop.spans(6) == ((1, 1), (3, 3))
    plan = config.plan
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


@pytest.mark.usefixtures("at_root")
def test_a_job_trains_by_a_task_that_is_a_file(tmp_path: Path) -> None:
    config = load_job(TASK)
    rows_BT = np.arange(12).reshape(2, 6)
    batch = config.task.build(config).open(tmp_path).batch(np.arange(2), rows_BT, 0)
    assert batch.inputs()["input_ids_BS"].tolist() == [[5, 4, 3, 2, 1], [11, 10, 9, 8, 7]]
    assert batch.inputs()["labels_BS"].tolist() == [[4, 3, 2, 1, 0], [10, 9, 8, 7, 6]]
    again = tmp_path / "job.yaml"
    again.write_text(dump_job(config))
    assert load_job(again) == config


def test_a_task_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"task\.kind: no file none\.py in "):
        load_job(TASK, ["task.kind=none.py:Task"])
    with pytest.raises(
        UserError,
        match=r"task\.kind: want one of causal_lm, masked_lm, .*, got 'causal_ln'; did you mean",
    ):
        load_job(TASK, ["task={kind: causal_ln}"])


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
        (
            "jobs/examples/every_other_layer.py:Other",
            "drop.method: want a whole class below DropMethod as Other in jobs/examples/every_",
        ),
        ("jobs/examples/every_other_layer.py:DropMethod", "drop.method: want a whole class below DropMethod as Drop"),
        (
            "jobs/examples/every_other_layer.py:Uniform",
            "drop.method: want a whole class below DropMethod as Uniform in ",
        ),
    ],
)
def test_a_method_that_is_not_there_is_named(method: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(EXAMPLE, [f"drop.method={method}"])
    assert said in str(caught.value)


@pytest.mark.usefixtures("at_root")
def test_keys_of_such_a_method_are_checked_like_all_others() -> None:
    with pytest.raises(UserError, match=r"drop\.recnt: unknown key; did you mean 'drop\.recent'\?"):
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


def test_a_key_of_a_type_that_no_job_has_is_named(tmp_path: Path) -> None:
    source = (EXAMPLE.parent / "every_other_layer.py").read_text()
    (tmp_path / "mine.py").write_text(
        source.replace("recent: int = 4", "recent: list[int] = field(default_factory=list)")
    )
    text = (tmp_path / "mine.py").read_text().replace("import dataclass, replace", "import dataclass, field, replace")
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=r"drop\.recent: a key can't be of type list\[int\]; want bool, str"):
        load_job(EXAMPLE, [f"drop.method={tmp_path}/mine.py:EveryOtherLayer", "drop.recent=[1]"])


@pytest.mark.usefixtures("at_root")
def test_a_file_that_is_gone_is_found_beside_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / "own").mkdir(parents=True)
    (run / "job.yaml").write_text(dump_job(load_job(EXAMPLE)))
    (run / "own" / "jobs__examples__every_other_layer.py").write_text(EXAMPLE.with_suffix(".py").read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"TOKENDROP_RUN_COPIES=1 runs the copy in .*/run/own/jobs__ex.*should trust"):
        load_job(run / "job.yaml")
    monkeypatch.setenv("TOKENDROP_RUN_COPIES", "1")
    assert load_job(run / "job.yaml").drop.spans(4) == ((1, 1),)
    (run / "own" / "jobs__examples__every_other_layer.py").unlink()
    with pytest.raises(UserError, match=r"no file jobs/examples/every_other_layer\.py in"):
        load_job(run / "job.yaml")


def test_a_class_of_a_file_is_that_of_this_process_where_the_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.with_suffix(".py").read_text())
    name = "mine.py:EveryOtherLayer"
    method = named_class(name, "drop.method", DropMethod)
    content = content_of(name)
    elsewhere = type("EveryOtherLayer", (method,), {"__module__": "of another process"})(method=name, recent=7)
    here = loaded_here(elsewhere, "drop.method", name, content)
    assert type(here) is method
    assert (here.method, here.recent) == (name, 7)
    file.write_text(f"{EXAMPLE.with_suffix('.py').read_text()}# changed\n")
    assert content_of(name) == content  # of what is loaded
    with pytest.raises(UserError, match=r"^drop\.method: mine\.py has changed since it was read"):
        loaded_here(elsewhere, "drop.method", name, content)
    changed = named_class(name, "drop.method", DropMethod)
    assert changed is not method  # nothing of what was refused is left
    assert content_of(name) != content
    with pytest.raises(UserError, match=r"^drop\.method: mine\.py has changed since it was read"):
        loaded_here(elsewhere, "drop.method", name, content)  # the file is as it was loaded here, not as it was there
    assert named_class(name, "drop.method", DropMethod) is not method
    file.write_text(EXAMPLE.with_suffix(".py").read_text())
    with pytest.raises(UserError, match=r"^drop\.method: mine\.py has changed since it was read"):
        loaded_here(elsewhere, "drop.method", name, content)  # it would be the changed class
    assert loaded_here(elsewhere, "drop.method", name, content).recent == 7
    file.unlink()
    sys.modules.pop(type(here).__module__)
    with pytest.raises(UserError, match=r"^drop\.method: no file mine\.py in "):
        loaded_here(elsewhere, "drop.method", name, content)


def test_what_is_no_file_stays() -> None:
    drop = experiment().drop
    assert loaded_here(drop, "drop.method", drop.method, None) is drop
    assert content_of("package.module:Mine") is None
