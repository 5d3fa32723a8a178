"""Layers that multiply in fp8, emulated, train close to those that do not, the same however they are run and saved."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode

from attempts import lone_worker
from groups import together, train_until
from tiny import assert_same, experiment, gpt
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.track.journal import read_steps
from tokendrop.train import fp8, installed
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.installed import check_installed
from tokendrop.train.loop import accumulate
from tokendrop.train.reader import CheckpointReader, load_weights

torchao = pytest.importorskip("torchao", reason="torchao is not installed: pip install 'tokendrop[fp8]'")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

RECIPES = ("tensorwise", "rowwise")
FP32, BF16 = torch.float32, torch.bfloat16
COMPILER = "g++"
STEPS = 6
CPU = torch.device("cpu")


def job(recipe: str | None, **changes: Any) -> ExperimentConfig:
    how = {"train__precision": "auto", "train__fp8": recipe, "train__fp8_emulated": recipe is not None}
    return experiment(**{**how, "train__micro_batch": 2, "train__strategy": "ddp"} | changes)


FSDP, AGAIN = {"train__strategy": "fsdp"}, {"train__activation_checkpointing": True}
LEGS: dict[str, list[tuple[int, int, str | None, torch.dtype, dict[str, Any]]]] = {
    # name: workers, the step that they train to, recipe, the dtype of the rest, other keys; one leg after another
    "plain": [(1, 6, None, FP32, {})],
    "tensorwise": [(1, 6, "tensorwise", FP32, {})],
    "rowwise": [(1, 6, "rowwise", FP32, {})],
    "plain bf16": [(1, 6, None, BF16, {})],
    "tensorwise bf16": [(1, 6, "tensorwise", BF16, {})],
    "gone on": [(1, 2, "tensorwise", FP32, {}), (1, 6, "tensorwise", FP32, {})],
    "again": [(1, 6, "tensorwise", FP32, AGAIN)],
    "again bf16": [(1, 6, "tensorwise", BF16, AGAIN)],
    "two": [(2, 6, "tensorwise", FP32, {})],
    "two rowwise": [(2, 6, "rowwise", FP32, {})],
    "fsdp": [(2, 6, "tensorwise", FP32, FSDP)],
    "fsdp bf16": [(2, 6, "tensorwise", BF16, FSDP | AGAIN)],
    "to plain": [(1, 2, "tensorwise", FP32, {}), (2, 4, None, FP32, FSDP), (1, 6, None, FP32, {})],
    "from plain": [(1, 2, None, FP32, {}), (2, 4, "tensorwise", FP32, FSDP), (1, 6, "tensorwise", FP32, {})],
}


def legs(number: int, workers: int, folder: Path) -> None:
    """What each worker of a group does: the leg of that number, of the runs in which so many workers have it."""
    for name, some in LEGS.items():
        if number < len(some) and some[number][0] == workers:
            _, stop, recipe, dtype, changes = some[number]
            train_until(job(recipe, **changes), folder / name, stop, dtype)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    for number, workers in [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]:
        together(workers, legs, number, workers, folder)
    return folder


def column(run: Path, key: str = "loss") -> np.ndarray:
    return np.array([row[key] for row in read_steps(run) if row[key] is not None])


def apart(run: Path, other: Path) -> float:
    """The most by which losses differ."""
    return float(np.abs(column(run) - column(other)).max())


@pytest.mark.parametrize(("name", "plain"), [*((one, "plain") for one in RECIPES), ("tensorwise bf16", "plain bf16")])
def test_losses_are_close_to_those_without_and_not_the_same(runs: Path, name: str, plain: str) -> None:
    """In validation too, which runs in fp8 as training does."""
    for key in ("loss", "val_loss", "grad_norm"):
        found, expected = column(runs / name, key), column(runs / plain, key)
        np.testing.assert_allclose(found, expected, rtol=0.02)
        assert not np.any(found == expected)
    assert apart(runs / name, runs / plain) < 2e-3


def test_recipes_differ(runs: Path) -> None:
    assert not np.any(column(runs / "tensorwise") == column(runs / "rowwise"))


def test_a_run_that_goes_on_is_an_uninterrupted_one_bit_for_bit(runs: Path) -> None:
    for key in ("loss", "val_loss", "grad_norm"):
        assert column(runs / "gone on", key).tolist() == column(runs / "tensorwise", key).tolist()
    assert_same(weights(runs / "gone on"), weights(runs / "tensorwise"))


@pytest.mark.parametrize("precision", ["", " bf16"])
def test_layers_that_are_computed_again_are_the_same_bit_for_bit(runs: Path, precision: str) -> None:
    for key in ("loss", "val_loss", "grad_norm"):
        expected = column(runs / f"tensorwise{precision}", key)
        assert column(runs / f"again{precision}", key).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "alone"),
    [("two", "tensorwise"), ("two rowwise", "rowwise"), ("fsdp", "tensorwise"), ("fsdp bf16", "tensorwise bf16")],
)
def test_neither_workers_nor_strategies_show(runs: Path, name: str, alone: str) -> None:
    """Scales are those of a micro batch, so the first step is the same; then sums in another order may round apart."""
    for key in ("loss", "grad_norm"):
        found, expected = column(runs / name, key), column(runs / alone, key)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(found, expected, rtol=0.01)


@pytest.mark.parametrize(("name", "begun", "other"), [("to plain", "tensorwise", "plain")])
def test_a_checkpoint_of_one_is_read_as_the_other(runs: Path, name: str, begun: str, other: str) -> None:
    for one, first, then in ((name, begun, other), ("from plain", other, begun)):
        assert column(runs / one)[:2].tolist() == column(runs / first)[:2].tolist()
        assert not np.any(column(runs / one)[2:] == column(runs / first)[2:])
        assert apart(runs / one, runs / first) < 2 * apart(runs / first, runs / then) < 4e-3


def test_checkpoints_are_those_of_a_plain_run(runs: Path) -> None:
    """Keys, sizes and dtypes: nothing says that they were made by fp8."""
    found = []
    for name in LEGS:
        stored = CheckpointReader(committed(runs / name / CHECKPOINTS)[-1]).metadata.state_dict_metadata
        tensors = {key: one for key, one in stored.items() if isinstance(one, TensorStorageMetadata)}
        found.append({key: (one.size, one.properties.dtype) for key, one in tensors.items()})
    assert all(one == found[0] for one in found)
    assert {dtype for _, dtype in found[0].values()} == {torch.float32}


def weights(run: Path) -> dict[str, torch.Tensor]:
    model = gpt(dtype=torch.float32)
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.named_parameters())


TEXT = {"layers": 3, "width": 32, "heads": 2, "sequence_length": 32, "vocab_size": 60}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"kind": "gpt", **TEXT}},
    "router": {"model": {"kind": "gpt", **TEXT}, "drop": {"method": "mixture_of_depths"}},
    "bert": {"model": {"kind": "bert", **TEXT}, "task": {"kind": "masked_lm"}},
    "vit": {
        "model": {"kind": "vit", **{key: TEXT[key] for key in ("layers", "width", "heads")}}
        | {"image_size": 32, "patch_size": 8, "classes": 10},
        "task": {"kind": "image_classification"},
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_layers_linear_modules_are_in_fp8_and_nothing_else(kind: str, recipe: str) -> None:
    plain, ours = (lone_worker(job(one, **MODELS[kind])).engine.model for one in (None, recipe))
    assert_same(ours.state_dict(), plain.state_dict())
    changed = {name for name, one in ours.named_modules() if type(one) is not type(plain.get_submodule(name))}
    linear = {name for name, one in plain.named_modules() if isinstance(one, torch.nn.Linear)}
    assert changed == {name for name in linear if name.startswith("blocks.")}
    assert len(changed) == 4 * TEXT["layers"]
    assert {type(ours.get_submodule(name)).__name__ for name in changed} == {"Float8Linear"}


class Products(TorchDispatchMode):
    """Notes the sizes of each product in fp8, (M, K) by (K, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(
            one.__name__ == "Float8TrainingTensor" for one in types
        ):  # torchao's own tensors take themselves apart, and ask here again
            return NotImplemented
        if func is torch.ops.aten._scaled_mm.default:
            self.found.add((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def gradients(config: ExperimentConfig) -> tuple[dict[str, torch.Tensor], set[tuple[int, int, int]]]:
    """Of the first step, with the products that it took in fp8."""
    parts = lone_worker(config)
    parts.engine.dtype = BF16  # in which GPUs give what they multiply in fp8
    with Products() as products:
        accumulate(config, config.plan, parts, 0)
    found = {name: p.grad for name, p in parts.engine.model.named_parameters() if p.grad is not None}
    return found, products.found


@pytest.mark.parametrize("kept", [4, 5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_real_products_are_the_emulated_ones_and_have_the_sizes_that_gpus_want(
    recipe: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own product in fp8 for CPUs, which takes any size; GPUs want K and N to be multiples of 16."""
    monkeypatch.setattr(fp8, "computes_in_fp8", lambda device: True)
    changes: dict[str, Any] = {"train__micro_batch": 4, "drop": {"method": "constant", "kept": kept}}
    emulated, nothing = gradients(job(recipe, **changes))
    real, products = gradients(job(recipe, train__fp8_emulated=False, **changes))
    assert not nothing
    assert {(rows, inner) for rows, inner, _ in products} >= {(4 * kept, 16), (4 * 16, 16)}
    assert {4 * kept, -(-4 * kept // 16) * 16} & {inner for rows, inner, _ in products if rows == 48}
    assert all(inner % 16 == columns % 16 == 0 for _, inner, columns in products)
    assert emulated.keys() == real.keys()
    for name, gradient in emulated.items():
        torch.testing.assert_close(real[name], gradient, rtol=0.02, atol=0.02 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize(("kept", "micro_batch", "pads"), [(4, 4, False), (5, 4, True), (8, 2, False), (4, 2, True)])
def test_tokens_are_padded_just_where_the_plan_wants_it(kept: int, micro_batch: int, pads: bool) -> None:
    config = job("tensorwise", train__micro_batch=micro_batch, drop={"method": "constant", "kept": kept})
    assert fp8._wants_padding(config) == pads


def test_tokens_that_no_plan_knows_are_padded() -> None:
    changes: dict[str, Any] = {"train__micro_batch": 8, "drop": {"method": "mixture_of_depths"}}
    assert fp8._wants_padding(job("tensorwise", **changes))


def test_a_device_without_fp8_is_refused() -> None:
    assert not fp8.computes_in_fp8(CPU)
    with pytest.raises(UserError, match=r"^train\.fp8: this cpu has no fp8; want a GPU of compute capability 8\.9 or"):
        lone_worker(job("tensorwise", train__fp8_emulated=False))


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_gpus_have_it_from_ada_and_hopper_on(
    capability: tuple[int, int], has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fp8.computes_in_fp8(torch.device("cuda", 0)) == has_fp8


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    check_installed(job(None).train)
    with pytest.raises(UserError, match=r"^train\.fp8: torchao is not installed here; want pip install 'tokend"):
        check_installed(job("tensorwise").train)


def test_linear_modules_of_other_sizes_are_named() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(16, 32), torch.nn.Sequential(torch.nn.Linear(16, 20))])
    with pytest.raises(UserError, match=r"^train\.fp8: .* multiples of 16, got 16 x 20 in layer 1\.0; want"):
        fp8.multiply_in_fp8(layers, job("tensorwise"), CPU)


COMPILED: dict[str, Any] = {"train__length": "3 steps", "model__layers": 3, "evaluate__every": "3 steps"}


def eager_and_compiled(folder: Path) -> None:
    """What each worker of the group does."""
    for strategy in ("ddp", "fsdp"):
        for compiled in (False, True):
            torch._dynamo.reset()
            config = job("tensorwise", train__compile=compiled, train__strategy=strategy, **COMPILED)
            train_until(config, folder / f"{strategy} {compiled}", 3, FP32, warms=compiled)
    train_until(job(None, **COMPILED), folder / "plain", 3, FP32)


@pytest.mark.long
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"inductor needs {COMPILER}, which is not here")
@pytest.mark.timeout(900)
def test_compiled_layers_train_as_eager_ones_do(tmp_path: Path) -> None:
    """Closer to them in the first step than layers without fp8 are; then what is rounded to the other side adds up."""
    together(2, eager_and_compiled, tmp_path)
    for strategy in ("ddp", "fsdp"):
        eager, compiled = tmp_path / f"{strategy} False", tmp_path / f"{strategy} True"
        for key in ("loss", "grad_norm"):
            ours, theirs, plain = column(compiled, key), column(eager, key), column(tmp_path / "plain", key)
            assert abs(ours[0] - theirs[0]) < abs(plain[0] - theirs[0]) / 10
            np.testing.assert_allclose(ours, theirs, rtol=0.01)
