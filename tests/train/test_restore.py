"""However many workers restore, storage gives each byte once; what they get is what was saved, or they say so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from groups import go_by, together
from mutations import flip_bit, seal_again
from reads import counted_reads
from sharing import HAS_DEEPSPEED, job
from tiny import Rows, assert_same
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError
from tokendrop.train.checkpoint import Checkpoints, SetAsideError
from tokendrop.train.checkpoint_index import committed, committed_step, step_name, write_meta
from tokendrop.train.engines.base import Engine
from tokendrop.train.engines.ddp import shared_out
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.worker import build_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STRATEGIES = ["ddp", "fsdp", *(["zero 1", "zero 3"] if HAS_DEEPSPEED else [])]
PATHS = [(1, 4), (2, 4), (4, 2)]  # workers that save, and that restore
SAVED, AGAIN, STEP = "saved", "again", 3


def engine_of(config: ExperimentConfig) -> Engine:
    DeepSpeedEngine.whole_below = 0
    return build_engine(config, torch.device("cpu"))[0]


def train_some(engine: Engine, config: ExperimentConfig) -> None:
    """Steps after which no moment of Adam's is 0."""
    for _ in range(2):
        batch = next(iter(Rows(config).of_step(0)))
        engine.forward_backward(batch, share=1.0, last_micro_batch=True)
        engine.step(lr=0.01, max_grad_norm=1.0)


def save_each(folder: Path) -> None:
    for strategy in STRATEGIES:
        config = job(strategy, "fp32")
        engine = engine_of(config)
        train_some(engine, config)
        save(engine, folder / strategy / SAVED)


def save(engine: Engine, folder: Path, *steps: int) -> None:
    checkpoints = Checkpoints(folder, keep=9, meta={})
    for step in steps or (STEP,):
        checkpoints.save(engine, step)
        checkpoints.wait()


def restore_each(folder: Path) -> None:
    """Restore by every strategy, write down what each rank read, and save what came of it."""
    for strategy in STRATEGIES:
        engine, below = engine_of(job(strategy, "fp32")), folder / strategy
        checkpoints = Checkpoints(below / SAVED, keep=9, meta={})
        with counted_reads(below / SAVED) as counts:
            newest = checkpoints.newest()
            assert newest is not None
            assert checkpoints.load(engine, newest) == STEP
        (below / f"rank{dist.get_rank()}.json").write_text(json.dumps(counts))
        save(engine, below / AGAIN)


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: f"{path[0]} to {path[1]}")
def restored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    savers, readers = request.param
    folder = tmp_path_factory.mktemp("restored")
    together(savers, save_each, folder)
    together(readers, restore_each, folder)
    return readers, folder


def part_sizes(checkpoint: Path) -> list[int]:
    tensors = json.loads((checkpoint / "index.json").read_text()).values()
    parts = [part["length"] for tensor in tensors for part in tensor.get("parts", [])]
    return parts + [length for tensor in tensors if "slices" in tensor for length in tensor["slices"]["length"]]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, read by one process."""
    engine: Any = engine_of(job("ddp", "fp32"))
    Checkpoints(folder, keep=9, meta={}).load(engine, committed(folder)[-1])
    moments = {
        f"{name}.{key}": value
        for name, parameter in engine.model.named_parameters()
        for key, value in engine.optimizers[0].state[parameter].items()
    }
    return {**engine.model.state_dict(), **moments}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_byte_is_read_once_by_one_of_the_ranks_and_each_reads_its_share(
    restored: tuple[int, Path], strategy: str
) -> None:
    readers, folder = restored
    checkpoint = folder / strategy / SAVED / step_name(STEP)
    ranks = [json.loads((folder / strategy / f"rank{rank}.json").read_text()) for rank in range(readers)]
    data = list(checkpoint.glob("*.distcp"))
    total, largest = sum(path.stat().st_size for path in data), max(part_sizes(checkpoint))

    by_rank = [sum(read for name, read in one.items() if name.endswith(".distcp")) for one in ranks]

    assert sum(by_rank) <= total
    assert sum(by_rank) == total or strategy.startswith("zero")  # which wants one step count for all parameters
    assert max(by_rank) <= 1.2 * total / readers + 2 * largest  # shares of FSDP's are of unequal size
    for one in ranks[1:]:
        assert not {"meta.json", "index.json"} & one.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_restored_is_what_was_saved_bit_for_bit(restored: tuple[int, Path], strategy: str) -> None:
    _, folder = restored
    assert_same(state_of(folder / strategy / AGAIN), state_of(folder / strategy / SAVED))


def as_parts(tensor: dict[str, Any], files: list[str]) -> dict[str, Any]:
    """What an index said of a tensor before there were slices."""
    if "slices" not in tensor:
        return tensor
    slices, (first, *rest) = tensor.pop("slices"), tensor["shape"]
    rows, columns = slices["rows"], zip(*(slices[key] for key in ("file", "offset", "length", "crc32")), strict=True)
    tensor["parts"] = [
        {"at": [n * rows, *[0] * len(rest)], "shape": [min(rows, first - n * rows), *rest]}
        | {"file": files[file], "offset": offset, "length": length, "crc32": crc32}
        for n, (file, offset, length, crc32) in enumerate(columns)
    ]
    return tensor


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_index_with_a_line_for_each_part_is_read_as_the_one_with_slices(
    restored: tuple[int, Path], strategy: str, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(restored[1] / strategy / AGAIN / step_name(STEP), tmp_path / step_name(STEP))
    tensors = json.loads((checkpoint / "index.json").read_text())
    assert any("slices" in tensor for tensor in tensors.values()) == (strategy == "fsdp")
    files = sorted(path.name for path in checkpoint.glob("*.distcp"))
    (checkpoint / "index.json").write_text(json.dumps({name: as_parts(one, files) for name, one in tensors.items()}))
    seal_again(checkpoint, step=STEP)
    assert_same(state_of(tmp_path), state_of(restored[1] / strategy / SAVED))


def test_to_look_where_a_run_is_reads_none_of_its_tensors(restored: tuple[int, Path]) -> None:
    """The driver looks at each change of workers: what the run itself has just written is read by those who load it."""
    _, folder = restored
    with counted_reads(folder / "ddp" / SAVED) as counts:
        assert committed_step(folder / "ddp" / SAVED) == STEP
        assert Checkpoints(folder / "ddp" / SAVED, keep=9, meta={}).newest() is not None
    assert counts.keys() <= {"meta.json"}


def find_damage(folder: Path) -> None:
    """Every rank of every strategy is told of a part that one of them alone has read."""
    for strategy in STRATEGIES:
        checkpoints = Checkpoints(folder / strategy, keep=9, meta={})
        for want in (SetAsideError, DamagedDataError):
            newest = checkpoints.newest()
            assert newest is not None
            with pytest.raises(want, match=rf"{newest}/__0_0.distcp: damaged"):
                checkpoints.load(engine_of(job(strategy, "fp32")), newest)


def test_damage_that_one_rank_reads_is_known_to_all_and_the_checkpoint_before_counts(tmp_path: Path) -> None:
    for strategy in STRATEGIES:
        save(engine_of(job("ddp", "fp32")), tmp_path / strategy, 3, 6)
        for checkpoint in committed(tmp_path / strategy):
            flip_bit(checkpoint / "__0_0.distcp", 0.4)
    together(2, find_damage, tmp_path)
    for strategy in STRATEGIES:
        assert [path.name for path in committed(tmp_path / strategy)] == [step_name(3)]
        assert (tmp_path / strategy / f"{step_name(6)}.damaged").is_dir()


def test_ranks_go_on_from_what_rank_0_sees_whatever_their_own_view_of_the_storage(tmp_path: Path) -> None:
    views = [tmp_path / "now", tmp_path / "a minute ago"]
    for view, steps in zip(views, ([3, 6], [3]), strict=True):
        for step in steps:
            (view / step_name(step)).mkdir(parents=True)
            write_meta(view / step_name(step), {"step": step}, {})
    together(2, go_by, step_name(6), views)


def test_all_ranks_go_on_from_the_checkpoint_before_a_damaged_one_or_none_does(tmp_path: Path) -> None:
    """Whatever their own view of the storage: rank 0 decides."""
    for view in ("whole", "damaged"):
        for step in (3, 6):
            (tmp_path / view / step_name(step)).mkdir(parents=True)
            write_meta(tmp_path / view / step_name(step), {"step": step}, {})
    (tmp_path / "damaged" / step_name(6) / "meta.json").write_text("{torn")
    together(2, go_by, step_name(3), [tmp_path / "damaged", tmp_path / "whole"])
    (tmp_path / "damaged" / step_name(3) / "meta.json").write_text("{torn")
    together(2, go_by, None, [tmp_path / "damaged", tmp_path / "whole"])


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_what_all_workers_hold_is_saved_by_one_of_them_and_by_all_about_as_much(sizes: list[int], workers: int) -> None:
    tensors = {f"tensor{number}": [torch.empty(size), torch.empty(size)] for number, size in enumerate(sizes)}
    owners = shared_out(tensors, workers)
    assert owners.keys() == tensors.keys()
    held = [sum(8 * sizes[int(name[6:])] for name in owners if owners[name] == worker) for worker in range(workers)]
    assert sum(held) == 8 * sum(sizes)
    assert max(held) - min(held) <= 8 * max(sizes, default=0)


def test_a_worker_under_ddp_copies_no_more_than_its_share(tmp_path: Path) -> None:
    together(2, write_names, tmp_path)
    first, second = (set((tmp_path / f"{rank}").read_text().split()) for rank in range(2))
    assert not first & second
    assert first | second == dict(engine_of(job("ddp", "fp32")).model.named_parameters()).keys()


def write_names(folder: Path) -> None:
    engine = engine_of(job("ddp", "fp32"))
    train_some(engine, job("ddp", "fp32"))
    state = engine.state()
    assert state["model"].keys() == state["optimizer"]["state"].keys()
    (folder / f"{dist.get_rank()}").write_text(" ".join(state["model"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_a_gpu_saves_is_what_it_holds_each_time(tmp_path: Path) -> None:
    config = job("ddp", "fp32")
    engine = build_engine(config, torch.device("cuda", 0))[0]
    checkpoints = Checkpoints(tmp_path, keep=9, meta={})
    for step in (1, 2):  # the second time into the memory of the first
        for parameter in engine.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        engine.step(lr=0.01, max_grad_norm=1.0)
        checkpoints.save(engine, step)
        checkpoints.wait()
        saved = state_of(tmp_path)
        assert all(torch.equal(saved[name], value.cpu()) for name, value in engine.model.state_dict().items())
