"""A checkpoint is what was written, or one sentence says what is wrong; whatever is in it, none of it is run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings

from mutations import Mutation, mutations, seal_again
from tiny import assert_same, experiment, gpt, loss_of
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.models.build import build_model
from tokendrop.train.checkpoint import Checkpoints, SetAsideError
from tokendrop.train.checkpoint_index import (
    META,
    check_whole,
    committed,
    committed_step,
    newest_whole,
    read_meta,
    step_name,
    write_meta,
)
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.reader import load_weights
from tokendrop.train.sealed import seal_json
from tokendrop.train.storage import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def engine_of(step: int) -> DdpEngine:
    """A model whose weights tell of the step."""
    config = experiment()
    model = build_model(config.model, seed=step).double()
    return DdpEngine(model, build_optimizers(model, config.train), torch.float64, loss=loss_of)


def save(folder: Path, *steps: int, keep: int = 9) -> list[Path]:
    checkpoints = Checkpoints(folder, keep=keep, meta={"name": "tiny"})
    for step in steps:
        checkpoints.save(engine_of(step), step)
        checkpoints.wait()
    return committed(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with the checkpoints of steps 3 and 6; its tests leave it as it is."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 3, 6)
    return folder


@pytest.fixture
def folder(tmp_path, saved) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    plain = gpt()
    load_weights(plain, checkpoint)
    return dict(plain.state_dict())


def test_every_file_of_a_checkpoint_has_its_checksum(saved) -> None:
    for checkpoint in committed(saved):
        files = read_meta(checkpoint)["files"]
        assert {*files, META} == {path.name for path in checkpoint.iterdir()}
        assert not (checkpoint / ".metadata").exists()  # torch's index, a pickle
        check_whole(checkpoint)


@given(mutations())
@settings(max_examples=60, derandomize=True)
def test_whatever_happens_to_a_file_the_run_goes_on_from_what_was_written(saved, tmp_path_factory, mutation) -> None:
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("damaged") / "checkpoints"))
    newest = folder / step_name(6)
    before = {path: path.read_bytes() for path in newest.iterdir()}
    path = mutation.strike(newest)
    changed = not path.exists() or path.read_bytes() != before[path]
    assert newest_whole(folder) == folder / step_name(3 if changed else 6)
    if changed:
        with pytest.raises(DamagedDataError, match=str(path)):
            check_whole(newest)
    step, restored = restore(folder)
    assert step == (3 if changed else 6)
    assert committed_step(folder) == step
    assert_same(restored, dict(engine_of(step).model.state_dict()))


def restore(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """What a worker does, or a second one where the first found damage: the step, and the weights then."""
    for _ in range(2):
        engine, checkpoints = engine_of(0), Checkpoints(folder, keep=9, meta={})
        newest = checkpoints.newest()
        assert newest is not None
        with suppress(SetAsideError):
            step = checkpoints.load(engine, newest)
            return step, dict(engine.model.state_dict())
    raise AssertionError("the checkpoint before is whole")


@pytest.mark.parametrize("kind", ["delete", "truncate", "duplicate"])
def test_the_checkpoint_before_counts_and_it_is_said_so(folder, capsys, kind) -> None:
    path = Mutation(kind=kind, file=0.0, where=0.5).strike(folder / step_name(6))
    checkpoints = Checkpoints(folder, keep=1, meta={})
    newest = checkpoints.newest()
    assert newest == folder / step_name(3)
    said = capsys.readouterr().err
    assert said.startswith(f"note     {path}: ")
    assert said.endswith(f"; {step_name(3)} counts in its place\n")
    assert said.count("\n") == 1
    assert_same(weights(folder / step_name(3)), dict(engine_of(3).model.state_dict()))
    # what is damaged is in nobody's way, and never kept in the place of what is whole
    assert committed(folder) == [newest]
    checkpoints.save(engine_of(4), 4)
    checkpoints.wait()
    assert newest_whole(folder) == folder / step_name(4)


def test_where_none_is_whole_one_sentence_says_so(folder) -> None:
    for checkpoint in committed(folder):
        Mutation(kind="truncate", file=0.0, where=0.5).strike(checkpoint)
    for look in (newest_whole, committed_step, lambda folder: Checkpoints(folder, keep=1, meta={}).newest()):
        with pytest.raises(DamagedDataError, match=r"step_000000006/.*: damaged.* no other checkpoint that is whole$"):
            look(folder)
    assert len(committed(folder)) == 2


@pytest.mark.parametrize(
    "meta",
    [
        {"step": 7},
        {"step": "6"},
        {"step": True},
        {},
        {"step": 6, "files": 3},
        {"step": 6, "files": {"a": 1}},
        {"step": 6, "files": {"a": {"bytes": "1", "sha256": "2"}}},
        {"step": 6, "files": {"../step_000000003/index.json": {"bytes": 1, "sha256": ""}}},
        {"step": 6, "files": {"/etc/hostname": {"bytes": 1, "sha256": ""}}},
    ],
    ids=str,
)
def test_what_a_checkpoint_says_of_itself_must_be_of_the_right_kind(folder, meta) -> None:
    (folder / step_name(6) / META).write_text(seal_json({"files": {}, **meta}))
    with pytest.raises(DamagedDataError, match=rf"^{folder}/step_000000006/meta.json: want "):
        check_whole(folder / step_name(6))
    assert committed_step(folder) == 3


def test_a_file_that_is_a_link_is_not_followed(folder, tmp_path) -> None:
    path = folder / step_name(6) / INDEX
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedDataError, match=r"found a link$"):
        check_whole(folder / step_name(6))


def test_a_checkpoint_that_is_a_link_does_not_count(folder, tmp_path) -> None:
    shutil.move(folder / step_name(6), tmp_path / step_name(6))
    (folder / step_name(6)).symlink_to(tmp_path / step_name(6))
    assert newest_whole(folder) == folder / step_name(3)


def test_an_index_without_a_checksum_is_not_read(folder) -> None:
    write_meta(folder / step_name(6), {"step": 6}, {})
    with pytest.raises(UserError, match=r"step_000000006: want a checkpoint with index\.json; found no files$"):
        weights(folder / step_name(6))


class Command:
    """What makes `pickle.load` create a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def as_index_of_torch(checkpoint: Path, made: Path) -> None:
    """In the place where torch has its own index, and in that of ours."""
    for name in (".metadata", INDEX):
        (checkpoint / name).write_bytes(pickle.dumps(Command(made)))


def as_tensor(checkpoint: Path, made: Path, protocol: int = 2) -> None:
    """In the place of a tensor."""
    index = json.loads((checkpoint / INDEX).read_text())
    content = BytesIO()
    torch.save(Command(made), content, pickle_protocol=protocol)
    (checkpoint / "more.distcp").write_bytes(content.getvalue())
    for part in index["model.tokens.weight"]["parts"]:
        part |= {"file": "more.distcp", "offset": 0, "length": len(content.getvalue())}
        part |= {"crc32": crc32(content.getvalue())}
    (checkpoint / INDEX).write_text(json.dumps(index))


def as_newer_tensor(checkpoint: Path, made: Path) -> None:
    as_tensor(checkpoint, made, protocol=4)


@pytest.mark.parametrize("hide", [as_index_of_torch, as_tensor, as_newer_tensor])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning")
def test_code_in_a_checkpoint_is_not_run(folder, tmp_path, hide: Callable[[Path, Path], None]) -> None:
    checkpoint, made = folder / step_name(6), tmp_path / "made"
    hide(checkpoint, made)
    seal_again(checkpoint, step=6)
    with pytest.raises(UserError, match=rf"^{checkpoint}") as refused:
        weights(checkpoint)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert not made.exists()


def change_part(**changes: Any) -> Callable[[Any], Any]:
    def change(index: Any) -> Any:
        index["model.tokens.weight"]["parts"][0] |= changes
        return index

    return change


def change_tensor(**changes: Any) -> Callable[[Any], Any]:
    def change(index: Any) -> Any:
        index["model.tokens.weight"] |= changes
        return index

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_part(file="../step_000000003/__0_0.distcp"),
        change_part(file="/etc/hostname"),
        change_part(file=None),
        change_part(offset=-5),
        change_part(offset="x"),
        change_part(length=10**30),
        change_part(shape=[-1, 2]),
        change_part(at=[0]),
        change_tensor(dtype="load"),
        change_tensor(dtype="nothing"),
        change_tensor(shape=[10**30]),
        change_tensor(shape=[2, 2]),
        change_tensor(parts={}),
        change_tensor(parts=None),
        lambda index: [],
        lambda index: {},
        lambda index: {**index, "model.tokens.weight": 5},
    ],
)
def test_an_index_that_leads_elsewhere_or_to_nothing_is_refused(folder, change) -> None:
    checkpoint = folder / step_name(6)
    (checkpoint / INDEX).write_text(json.dumps(change(json.loads((checkpoint / INDEX).read_text()))))
    seal_again(checkpoint, step=6)
    with pytest.raises(UserError, match=rf"^{checkpoint}") as refused:
        weights(checkpoint)
    assert "\n" not in str(refused.value)


def test_files_are_made_as_the_users_umask_wants_them(tmp_path) -> None:
    before = os.umask(0o027)
    try:
        (checkpoint,) = save(tmp_path / "checkpoints", 1)
    finally:
        os.umask(before)
    assert checkpoint.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in checkpoint.iterdir()} == {0o640}
