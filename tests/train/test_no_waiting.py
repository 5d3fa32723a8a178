"""A step is given to a GPU without waiting for it; its figures are read while it computes the next one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attempts import attempt, history
from fake_gpu import GPU, HostWaitsError, fake_gpu
from tiny import TOKENS, Rows, experiment, gpt_config, loss_of
from tokendrop.data.read.batches import CopyStream
from tokendrop.method import attach
from tokendrop.models.batch import Batch, TextBatch
from tokendrop.models.gpt import Gpt
from tokendrop.tasks.causal_lm import text_batch
from tokendrop.track.journal import read_ledger
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.loop import TrainComponents, start_step, train
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.task import Loss

CONFIG = experiment(train__precision="fp32", model__dropout=0.1)


class GpuRows(Rows):
    """Batches as they come from the stream of copies."""

    def of_step(self, step: int):
        for number in self.split.micro_batches(self.rank):
            inputs = [torch.zeros(self.split.micro_batch, TOKENS, dtype=torch.int64, device=GPU) for _ in range(2)]
            yield TextBatch(input_ids_BS=inputs[0], labels_BS=inputs[1], sample_ids_B=IDS, numbers=(number,))


class ForwardOnly(DdpEngine):
    """Autograd asks the driver for streams, which a GPU that is not there does not have."""

    @torch.no_grad()
    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return self.forward(self.model, batch)


IDS = torch.arange(CONFIG.train.micro_batch)


def parts_on_gpu() -> TrainComponents:
    model = Gpt(gpt_config(dropout=0.1))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, device=GPU)))
    return TrainComponents(
        engine=ForwardOnly(model, build_optimizers(model, CONFIG.train), torch.float32, loss=loss_of),
        dropping=attach(model, seed=1),
        batches=GpuRows(CONFIG),
        checkpoints=None,  # pyright: ignore[reportArgumentType]
        recorder=None,  # pyright: ignore[reportArgumentType]
        world_size=1,
        reads_behind=1,
    )


@pytest.mark.parametrize("step", [0, 5], ids=["dropping", "full length"])
def test_the_host_waits_for_nothing_in_a_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    plan = CONFIG.plan
    drops = plan.at(step).kept_length < TOKENS
    with fake_gpu(monkeypatch) as (seen, told):
        started = start_step(CONFIG, plan, parts_on_gpu(), step)
        assert started.sample_ids == IDS.tolist() * 2
        draws = len(seen.pinned)
        assert told == ["computing records"]
        with pytest.raises(HostWaitsError):
            started.read()
    assert draws == (2 if drops else 0)  # one for each micro batch


def test_waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        on_gpu, on_host = torch.zeros(3, device=GPU), torch.zeros(3)
        for waits in (
            lambda: on_gpu.cpu(),
            lambda: on_gpu.tolist(),
            lambda: on_gpu.sum().item(),
            lambda: bool(on_gpu.any()),
            lambda: torch.tensor([1, 2], device=GPU),
            lambda: on_host.to(GPU),
            lambda: on_host.to(GPU, non_blocking=True),  # not pinned
        ):
            with pytest.raises((HostWaitsError, RuntimeError)):
                waits()
        on_host.pin_memory().to(GPU, non_blocking=True)


def test_a_batch_is_copied_from_pinned_memory_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = text_batch(np.arange(2), np.zeros((2, TOKENS + 1), np.int64), 3)
    with fake_gpu(monkeypatch) as (seen, told):
        copies = CopyStream(GPU)
        on_gpu, copied = copies.copy(batch)
        assert told == ["thread on cuda:0", "on copying", "copying records"]
        copies.wait(on_gpu, copied)
        assert told[3:] == ["computing waits", "kept for computing", "kept for computing"]
        assert seen.copies == 2
        assert {value.device for value in on_gpu.inputs().values()} == {GPU}
        assert on_gpu.sample_ids_B is batch.sample_ids_B
        assert on_gpu.numbers == (3,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gets_the_batches_as_they_are() -> None:
    device = torch.device("cuda", 0)
    copies = CopyStream(device)
    for number in range(20):
        batch = text_batch(np.arange(2), np.full((2, 10_000), number), number)
        on_gpu, copied = copies.copy(batch)
        copies.wait(on_gpu, copied)
        for name, value in on_gpu.inputs().items():
            assert torch.equal(value.cpu(), batch.inputs()[name])


def test_figures_that_are_read_late_are_those_of_their_steps(tmp_path: Path) -> None:
    for lag in range(3):
        (tmp_path / str(lag)).mkdir()
        attempt(experiment(), tmp_path / str(lag), reads_behind=lag)
    expected = history(tmp_path / "0")
    assert [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    for lag in ("1", "2"):
        assert history(tmp_path / lag) == expected
        assert read_ledger(tmp_path / lag) == read_ledger(tmp_path / "0")


class Told:
    """Recorder and checkpoints that note when they are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self, report, sample_ids) -> None:
        self.calls.append(f"record {report.step}")

    def commit(self, step) -> None:
        self.calls.append(f"commit {step}")

    def save(self, engine, step) -> None:
        self.calls.append(f"save {step}")

    def pause(self, step, *, checkpoint_s) -> None: ...

    def wait(self) -> None: ...


class ToldRows(Rows):
    def __init__(self, config, told: list[str]) -> None:
        super().__init__(config)
        self.told = told

    def of_step(self, step: int):
        self.told.append(f"start {step + 1}")
        return super().of_step(step)


def calls(*, reads_behind: int, pause: int | None = None) -> list[str]:
    config = experiment(checkpoint__every="4 steps", evaluate__every="6 steps")
    model = Gpt(config.model).double()
    told = Told()
    parts = TrainComponents(
        engine=DdpEngine(model, build_optimizers(model, config.train), torch.float64, loss=loss_of),
        dropping=attach(model, seed=1),
        batches=ToldRows(config, told.calls),
        checkpoints=told,  # pyright: ignore[reportArgumentType]
        recorder=told,
        world_size=1,
        pause=lambda step: step + 1 == pause,
        reads_behind=reads_behind,
    )
    train(config, parts, start=0)
    return told.calls


def test_a_step_is_read_when_the_next_was_started_and_before_a_checkpoint() -> None:
    assert calls(reads_behind=1) == [
        *("start 1", "start 2", "record 1", "start 3", "record 2", "start 4", "record 3", "record 4"),
        *("commit 4", "save 4", "start 5", "start 6", "record 5", "record 6", "commit 6", "save 6"),
    ]


def test_a_pause_is_heeded_when_its_step_is_read() -> None:
    assert calls(reads_behind=0, pause=2)[-3:] == ["record 2", "commit 2", "save 2"]
    assert calls(reads_behind=1, pause=2)[-5:] == ["start 3", "record 2", "record 3", "commit 3", "save 3"]
