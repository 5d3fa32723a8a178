"""Exported models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from mutations import KINDS
from tokendrop.atomic import atomic_folder
from tokendrop.cli.main import main
from tokendrop.data.tokenizer import END_OF_TEXT
from tokendrop.errors import UserError
from tokendrop.evaluate import export
from tokendrop.evaluate.export import check_free, export_checkpoint
from tokendrop.evaluate.load import load_run, locate

TOLERANCE = 1e-5


def test_an_exported_model_has_our_logits(tiny_run: Path, tmp_path: Path):
    model, _, _ = load_run(tiny_run)
    exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(tiny_run, tmp_path / "hf")[0]).eval()
    ids_BS = torch.randint(model.config.vocab_size, (3, model.config.sequence_length))

    with torch.no_grad():
        ours, theirs = model.logits(ids_BS), exported(ids_BS).logits

    assert isinstance(exported, GPT2LMHeadModel)
    assert ours.std() > 1
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


def test_an_exported_tokenizer_writes_our_ids_and_reads_them_back(tiny_run: Path, tmp_path: Path):
    _, tokenizer, _ = load_run(tiny_run)
    exported = AutoTokenizer.from_pretrained(export_checkpoint(tiny_run, tmp_path / "hf")[0])

    for text in ("the old bird", " leading, trailing ", "Ünïcode\n\n\ttabs don't . end<|endoftext|>next", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert exported.encode(text) == ids
        assert exported.decode(ids) == text
    assert {exported.eos_token, exported.bos_token, exported.unk_token} == {"<|endoftext|>"}


def test_an_exported_tokenizer_adds_no_special_tokens_whatever_it_was_made_for(
    tiny_run: Path, make_run, tmp_path: Path
):
    _, tokenizer, _ = load_run(tiny_run)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )
    assert len(tokenizer.encode("a").ids) == 3
    run = make_run(tmp_path, tokenizer)

    exported = AutoTokenizer.from_pretrained(export_checkpoint(run, tmp_path / "hf")[0])

    assert exported.encode("the old bird") == tokenizer.encode("the old bird", add_special_tokens=False).ids


def test_a_run_and_its_newest_checkpoint_export_the_same(tiny_run: Path, tmp_path: Path):
    checkpoint, _ = locate(tiny_run)
    one, other = (
        export_checkpoint(path, tmp_path / name)[0] for path, name in ((tiny_run, "run"), (checkpoint, "checkpoint"))
    )

    assert {file.name for file in one.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    for file in one.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_rotary_positions_are_no_gpt_2(tiny_run: Path, make_run, tmp_path: Path):
    run = make_run(tmp_path, load_run(tiny_run)[1], positions="rotary")

    with pytest.raises(UserError, match=r"rotary positions.*want model\.positions: learned"):
        export_checkpoint(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_is_there_already_is_not_overwritten(tiny_run: Path, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")

    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UserError, match="there already"):
            export_checkpoint(tiny_run, target)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_filled_with_files_that_others_can_read(tiny_run: Path, tmp_path: Path):
    target = tmp_path / "hf"
    target.mkdir()

    assert export_checkpoint(tiny_run, target) == (target, f"AutoModelForCausalLM.from_pretrained('{target}')")
    assert {file.stat().st_mode for file in target.iterdir()} == {(tiny_run / "job.yaml").stat().st_mode}


def test_a_link_to_an_empty_folder_fills_that(tiny_run: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hf").symlink_to("elsewhere")

    target, _ = export_checkpoint(tiny_run, tmp_path / "hf")

    assert target == tmp_path / "elsewhere"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.model_type == "gpt2"


def test_a_folder_that_can_not_be_replaced_is_refused(tmp_path: Path):
    """As where a volume is mounted; a file system that fails is told as well, and nothing is left of the work."""
    with pytest.raises(UserError, match=r"^/proc: a mount point, which nothing can be moved to; want a new "):
        check_free(Path("/proc"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(NotADirectoryError), atomic_folder(tmp_path / "link"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}


def test_an_export_that_fails_leaves_nothing(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(export, "as_fast_tokenizer", fail)

    with pytest.raises(RuntimeError, match="disk full"):
        export_checkpoint(tiny_run, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_checkpoint_or_a_tokenizer_is_the_users_mistake(tiny_run: Path, tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="want a run folder with a committed checkpoint"):
            export_checkpoint(path, tmp_path / "hf")

    checkpoint, _ = locate(tiny_run)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    moved = tmp_path / "run/checkpoints" / checkpoint.name
    moved.symlink_to(checkpoint)
    with pytest.raises(UserError, match=r"no tokenizer\.json in it"):
        export_checkpoint(moved, tmp_path / "hf")


def test_the_command_says_where_the_model_is(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["export", str(tiny_run), "--to", str(tmp_path / "hf"), "--json"])

    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "hf")}
    assert (tmp_path / "hf/model.safetensors").is_file()


@pytest.mark.parametrize("command", ["evaluate", "export"])
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("checkpoints/*/__0_0.distcp", "flip_bit"),
        ("checkpoints/*/index.json", "truncate"),
        ("checkpoints/*/meta.json", "delete"),
        ("job.yaml", "truncate"),
        ("tokenizer.json", "flip_bit"),
    ],
)
def test_what_is_damaged_is_neither_evaluated_nor_exported(tiny_run: Path, tmp_path: Path, capsys, command, file, kind):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (path,) = run.glob(file)
    KINDS[kind](path, 0.4)
    for of_it in {run, run.joinpath(*Path(file).parts[:-1]).parent / "step_000000007"} if "*" in file else {run}:
        to = ["--to", str(tmp_path / "hf")] if command == "export" else []
        with pytest.raises(SystemExit) as ended:
            main([command, str(of_it), *to])
        said = capsys.readouterr()
        assert ended.value.code == 1
        assert said.out == ""
        assert said.err.startswith(f"tokendrop: {path}: ")
        assert said.err.count("\n") == 1
    assert not (tmp_path / "hf").exists()
