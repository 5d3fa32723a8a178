"""Workers that share no folder save checkpoints together, by way of a store, and go on from there."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from groups import together
from sharing import job
from tiny import Rows, assert_same
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import META, check_whole, step_name
from tokendrop.train.worker import build_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class FolderStore:
    """A store that is a folder; it holds one checkpoint at a time, in the folder of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cut(self, step: int) -> None:
        pass

    def put(self, file: Path) -> None:
        (to := self.folder / file.parent.name.removesuffix(".partial")).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)

    def commit(self, checkpoint: Path) -> None:
        self.put(checkpoint / META)

    def remove_old(self, keep: int) -> None:
        pass


def save_apart(folder: Path, strategy: str) -> None:
    config, own = job(strategy, "fp32"), folder / f"rank{dist.get_rank()}"
    engine = build_engine(config, torch.device("cpu"))[0]
    checkpoints = Checkpoints(own, keep=1, meta={}, store=FolderStore(folder / "store"), leads=True)
    for step in (3, 6):
        engine.forward_backward(next(iter(Rows(config).of_step(0))), share=1.0, last_micro_batch=True)
        engine.step(lr=0.01, max_grad_norm=1.0)
        checkpoints.save(engine, step)
    checkpoints.wait()
    assert len(list(own.glob("step_*"))) == 1, "what was saved before has gone"
    shutil.rmtree(own)
    shutil.copytree(folder / "store" / step_name(6), own / step_name(6))
    again = build_engine(config, torch.device("cpu"))[0]
    newest = checkpoints.newest()
    assert newest == own / step_name(6)
    assert checkpoints.load(again, newest) == 6
    assert_same(again.state(), engine.state())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_workers_with_folders_of_their_own_save_is_whole_in_the_store(tmp_path: Path, strategy: str) -> None:
    together(2, save_apart, tmp_path, strategy)
    for step in (3, 6):
        check_whole(tmp_path / "store" / step_name(step))
    assert len(list((tmp_path / "store" / step_name(6)).glob("*.distcp"))) == 2, "each worker has written its part"
