"""The README: its code runs, its commands are commands, its links lead somewhere, and it is short."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from recorded import record
from tokendrop.cli.main import main, parse
from tokendrop.config.load import load_job
from tokendrop.method import DroppedLayer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BESIDE = ("jobs/README.md", "cluster/README.md", "dashboards/README.md", "platform/tokendrop/bench/README.md")
GUIDES = ("README.md", "CONTRIBUTING.md", *BESIDE)
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    tokendrop ")]
TOKENS, VOCABULARY = 16, 40


def blocks(language: str) -> list[str]:
    """The code of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_a_stranger_reads_it_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 120


def test_its_code_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    rows = torch.randint(VOCABULARY, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {
        "model": transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special)),
        "batches": [(torch.arange(2), rows[:2]), (torch.arange(2, 4), rows[2:4])],
        "rows": [{"input_ids": row, "labels": row} for row in rows],
        "Trainer": transformers.Trainer,
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True
        ),
    }
    by_hand, by_trainer = blocks("python")
    exec(by_hand, names)
    assert names["dropping"].layers == (1, 2)
    assert names["dropping"].kept(1).shape == (2, 8)
    assert not any(isinstance(module, DroppedLayer) for module in names["model"].modules())  # detached
    (routes,) = re.findall(r"`(attach\(model, [^`]*)`", README)
    names["model"] = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, "n_layer": 10}, **special))
    assert eval(routes, {**names, "attach": names["attach"]}).layers == tuple(range(2, 9))
    names["detach"](names["model"])
    exec(by_trainer, names)
    assert names["callback"].layer_tokens > 0


def test_its_job_is_one(tmp_path: Path) -> None:
    (job,) = blocks("yaml")
    (tmp_path / "job.yaml").write_text(job)
    baseline = (ROOT / "jobs" / "pretrain" / "quickstart_baseline.yaml").read_text()
    (tmp_path / "quickstart_baseline.yaml").write_text(baseline)
    assert load_job(tmp_path / "job.yaml") == load_job(ROOT / "jobs" / "pretrain" / "quickstart.yaml")


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_commands(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)[1:]
    if words == ["--help"]:
        return
    options = parse(words)
    if hasattr(options, "job"):
        load_job(options.job, options.overrides)
    if words[0] == "plan":
        main(words)
        assert "expected" in capsys.readouterr().out
    if words[0] == "sweep":
        main([*words, "--dry-run"])
        assert "trials" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if re.match(r"tokendrop (runs|report)\b", one)], ids=lambda one: one.split()[1]
)
def test_its_commands_over_runs_show_a_recorded_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    record(tmp_path / "runs" / "recorded")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)[1:]
    main(words)
    shown = capsys.readouterr().out
    if "--to" in words:
        shown = (tmp_path / words[words.index("--to") + 1]).read_text()
    assert ("nothing to remove" if words[:2] == ["runs", "clean"] else "recorded") in shown


def test_it_has_the_job_that_any_cluster_runs() -> None:
    (script, job) = re.findall(r"-- python (\S+) train (\S+)`", README)[0]
    assert (ROOT / script).is_file()
    assert (ROOT / job).is_file()


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / guide).read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (ROOT / guide).parent.joinpath(link).exists()]
    assert gone == []
