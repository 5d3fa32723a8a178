"""Attention by the kernel that a job names, or by the fastest for the lengths that it has: the same losses by each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tokendrop.train.attention_kernel as kernels
from attempts import lone_worker
from forks import JOB, trained, write_data
from groups import together
from tiny import TOKENS, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.track.run_folder import ENVIRONMENT, describe_run
from tokendrop.train.attention_kernel import attention_by, attention_calls, attention_seconds
from tokendrop.train.loop import start_step

CPU = torch.device("cpu")
EXACT = 1e-12  # float64
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Names(TorchDispatchMode):
    """The names of all operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.__name__.partition(".")[0])
        return func(*args, **kwargs or {})


def losses(config: ExperimentConfig, *, steps: int = 3) -> tuple[list[float], bool]:
    """Of a run's first steps, and whether torch's flash kernel was used."""
    parts = lone_worker(config)
    with attention_by(config, CPU, None, start=0), Names() as names:
        found = [start_step(config, config.plan, parts, step).read()[0].loss for step in range(steps)]
    return found, FLASH in names.found


def test_each_kernel_gives_the_same_losses() -> None:
    (auto, by_default), (flash, is_flash), (math, is_math_flash) = (
        losses(experiment(train__attention=kernel)) for kernel in ("auto", "flash", "math")
    )
    assert (by_default, is_flash, is_math_flash) == (True, True, False)
    assert auto == flash
    torch.testing.assert_close(torch.tensor(math), torch.tensor(flash), rtol=EXACT, atol=EXACT)


def test_after_the_block_torch_chooses_again() -> None:
    q_BHSW = torch.randn(1, 2, 4, 8)
    with attention_by(experiment(train__attention="math"), CPU, None, start=0):
        pass
    with Names() as names:
        torch.nn.functional.scaled_dot_product_attention(q_BHSW, q_BHSW, q_BHSW)
    assert FLASH in names.found


def test_a_kernel_that_the_device_lacks_is_refused() -> None:
    config = experiment(train__attention="cudnn")
    with (
        pytest.raises(UserError, match=r"^train\.attention: 'cudnn' does not run on this cpu in float64 \(16 tokens"),
        attention_by(config, CPU, None, start=0),
    ):
        pytest.fail("must not train")


def test_the_fastest_of_those_that_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment(train__attention="measured")
    with attention_by(config, CPU, None, start=0) as chosen:
        assert chosen["seconds"].keys() == {"flash", "math"}
        assert chosen["seconds"][chosen["kernel"]] == min(chosen["seconds"].values()) > 0
    for fastest in ("flash", "math"):
        times = {"flash": 2.0, "math": 2.0} | {fastest: 1.0}
        monkeypatch.setattr(kernels, "attention_seconds", lambda *_, found=times, **__: found)
        assert losses(config, steps=1)[1] == (fastest == "flash")


@given(start=st.integers(0, 39))
def test_what_is_timed_are_layers_of_steps_that_lie_ahead(start: int) -> None:
    config = experiment(train__length="40 steps")
    calls = attention_calls(config, start=start)
    of_a_step = {
        tuple(segment.kept_by_layer.get(layer, TOKENS) for layer in range(4))
        for segment in (config.plan.at(step) for step in range(start, 40))
    }
    steps = [tuple(call.tokens for call in calls[at : at + 4]) for at in range(0, len(calls), 4)]
    assert set(steps) <= of_a_step
    assert len(steps) == min(8, 40 - start)
    assert {(call.sequences, call.heads, call.head_width, call.causal) for call in calls} == {(4, 2, 8, True)}


def test_what_is_timed_has_several_lengths_of_a_schedule_that_grows() -> None:
    calls = attention_calls(experiment(train__length="40 steps"), start=0)
    assert {call.tokens for call in calls} == {4, 7, 10, 13, TOKENS}
    assert attention_seconds(calls, device=CPU, dtype=torch.float32, kernels=["flash"])["flash"] > 0


def disagree(folder: Path) -> None:
    """On each of two workers another kernel is the fastest."""
    rank = dist.get_rank()
    kernels.attention_seconds = lambda *_, **__: {"flash": float(rank), "math": float(1 - rank)}
    with attention_by(experiment(train__attention="measured"), CPU, dist.group.WORLD, start=0) as chosen:
        (folder / str(rank)).write_text(chosen["kernel"])


def test_all_workers_take_what_is_fastest_on_rank_0(tmp_path: Path) -> None:
    together(2, disagree, tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["flash", "flash"]


def test_a_run_tells_which_kernel_it_took(tmp_path: Path) -> None:
    config = experiment(**{**JOB, "train__attention": "measured"})
    run, data = tmp_path / "run", write_data(tmp_path / "data")
    run.mkdir()
    describe_run(run, config, data)
    trained(run, config, data)
    attention = json.loads((run / ENVIRONMENT).read_text())["workers"]["device"]["attention"]
    assert attention["kernel"] in attention["seconds"]
