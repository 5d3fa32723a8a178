"""Attention by the kernel that a job names, or by the fastest for the lengths that it has: the same losses by each."""

import json
import shutil
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
COMPILER = "g++"
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
    with attention_by(config, CPU, None, start=0, world_size=1), Names() as names:
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
    with attention_by(experiment(train__attention="math"), CPU, None, start=0, world_size=1):
        pass
    with Names() as names:
        torch.nn.functional.scaled_dot_product_attention(q_BHSW, q_BHSW, q_BHSW)
    assert FLASH in names.found


def test_a_kernel_that_the_device_lacks_is_refused() -> None:
    config = experiment(train__attention="cudnn")
    with (
        pytest.raises(UserError, match=r"^train\.attention: 'cudnn' does not run on this cpu in float64 .*; want auto"),
        attention_by(config, CPU, None, start=0, world_size=1),
    ):
        pytest.fail("must not train")


def test_the_fastest_of_those_that_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment(train__attention="measured")
    with attention_by(config, CPU, None, start=0, world_size=1) as chosen:
        assert chosen is not None
        assert chosen["seconds"].keys() == {"flash", "math"}
        assert chosen["seconds"][chosen["kernel"]] == min(chosen["seconds"].values()) > 0
    for fastest in ("flash", "math"):
        times = {"flash": 2.0, "math": 2.0} | {fastest: 1.0}
        monkeypatch.setattr(kernels, "attention_seconds", lambda *_, found=times, **__: (found, ""))
        assert losses(config, steps=1)[1] == (fastest == "flash")


@given(start=st.integers(0, 39))
def test_what_is_timed_are_layers_of_steps_that_lie_ahead(start: int) -> None:
    config = experiment(train__length="40 steps")
    calls = attention_calls(config, start=start, world_size=1)
    of_a_step = {
        tuple(segment.kept_by_layer.get(layer, TOKENS) for layer in range(4))
        for segment in (config.plan.at(step) for step in range(start, 40))
    }
    steps = [tuple(call.tokens for call in calls[at : at + 4]) for at in range(0, len(calls), 4)]
    assert set(steps) <= of_a_step
    assert len(steps) == min(8, 40 - start)
    assert {(call.sequences, call.heads, call.head_width, call.causal) for call in calls} == {(4, 2, 8, True)}


def test_what_is_timed_has_several_lengths_of_a_schedule_that_grows() -> None:
    calls = attention_calls(experiment(train__length="40 steps"), start=0, world_size=1)
    assert {call.tokens for call in calls} == {4, 7, 10, 13, TOKENS}
    assert attention_seconds(calls, device=CPU, dtype=torch.float32, kernels=["flash"])[0]["flash"] > 0


def disagree(folder: Path) -> None:
    """On each of two workers another kernel is the fastest."""
    rank = dist.get_rank()
    kernels.attention_seconds = lambda *_, **__: ({"flash": float(rank), "math": float(1 - rank)}, "")
    with attention_by(experiment(train__attention="measured"), CPU, dist.group.WORLD, start=0, world_size=2) as chosen:
        assert chosen is not None
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
    first = attention_of(run)
    assert first["kernel"] in first["seconds"]
    trained(run, config, data)
    assert attention_of(run) == first, "a run that goes on takes the same"
    trained(run, experiment(**JOB), data)
    assert attention_of(run) is None


def attention_of(run: Path) -> Any:
    return json.loads((run / ENVIRONMENT).read_text())["workers"]["device"].get("attention")


@pytest.mark.parametrize(("known", "taken"), [("math", "math"), ("no kernel", None)])
def test_what_was_chosen_before_is_taken_where_it_is_a_kernel(known: str, taken: str | None) -> None:
    config = experiment(train__attention="measured")
    with attention_by(config, CPU, None, start=0, world_size=1, known={"kernel": known}) as chosen:
        assert chosen is not None
        assert (chosen == {"kernel": taken}) == (taken is not None)
        assert ("seconds" in chosen) == (taken is None)


def test_on_a_cpu_in_bf16_no_kernel_is_named_that_would_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "pick_dtype", lambda *_: torch.bfloat16)
    for kernel in ("measured", "flash"):
        config = experiment(train__attention=kernel)
        with (
            pytest.raises(UserError, match=r"^train\.attention: on a CPU in bf16, .*; want auto"),
            attention_by(config, CPU, None, start=0, world_size=1),
        ):
            pytest.fail("must not train")


@pytest.mark.parametrize(
    "changes",
    [{"model__dropout": 0.1}, {"train__tensor_parallel": 2, "scaling__workers": 2}],
    ids=["dropout", "groups"],
)
def test_what_is_not_timed_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^train\.attention: measured times attention without padding, dropout and gr"):
        experiment(train__attention="measured", **changes)
    assert experiment(train__attention="math", **changes).train.attention == "math"


@pytest.mark.long
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"inductor needs {COMPILER}, which is not here")
def test_compiled_attention_is_by_that_kernel_whatever_is_in_torch_s_caches() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x_BHSW: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x_BHSW, x_BHSW, x_BHSW, is_causal=True)

    for kernel in ("auto", "math", "flash"):
        torch._dynamo.reset()
        compiled, x_BHSW = Attention(), torch.randn(2, 2, 16, 8, requires_grad=True)
        compiled.compile()
        with attention_by(experiment(train__attention=kernel), CPU, None, start=0, world_size=1):
            compiled(x_BHSW).sum().backward()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                compiled(x_BHSW).sum().backward()
        assert (f"aten::{FLASH}" in {event.key for event in profile.key_averages()}) == (kernel != "math")
