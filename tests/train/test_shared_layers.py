"""A layer that a group of workers shares out, its heads or its tokens, is the plain layer: outputs and gradients."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from groups import together
from tiny import Rows, assert_same, experiment, gpt_config
from tokendrop.config.model import BertConfig
from tokendrop.errors import UserError
from tokendrop.models import bert, gpt
from tokendrop.models.layer import Layer, recompute_layers
from tokendrop.models.shared_layers import QKV, by_kind, by_worker, share_layers
from tokendrop.models.shared_tokens import share_tokens
from tokendrop.train.engines.mesh import mesh_of_workers
from tokendrop.train.worker import build_engine

WIDTH, FLOAT64 = 24, 1e-12
SHARING = {"heads": share_layers, "tokens": share_tokens}
SHARED_OUT = ("qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight")


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_rows_by_worker_are_those_of_its_heads_and_go_back(workers: int, heads: int, width: int) -> None:
    rows = torch.arange(3 * workers * heads * width)
    ordered = by_worker(rows, workers)
    assert torch.equal(by_kind(ordered, workers), rows)
    for number, own in enumerate(ordered.chunk(workers)):
        of_kinds = [kind.chunk(workers)[number] for kind in rows.chunk(3)]
        assert torch.equal(own, torch.cat(of_kinds))


def wait_for_a_worker_that_hangs() -> None:
    mesh, begun = mesh_of_workers(torch.device("cpu"), {"replicas": 2, "group": 2}, timeout_s=3), time.monotonic()
    assert mesh["group"].mesh.tolist() == [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    assert mesh["replicas"].mesh.tolist() == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    if dist.get_rank() != 1:
        for name in ("group", "replicas"):
            group = mesh.get_group(name)
            if 1 in dist.get_process_group_ranks(group):
                with pytest.raises(RuntimeError, match=r"(?i)time"):
                    dist.all_reduce(torch.ones(1), group=group)
    time.sleep(max(0, 8 - (time.monotonic() - begun)))


def test_a_group_gives_a_worker_up_that_hangs_as_soon_as_all_workers_do() -> None:
    together(4, wait_for_a_worker_that_hangs)


def layers(kind: str) -> nn.ModuleList:
    """One layer of random weights, the same at every call."""
    torch.manual_seed(7)
    if kind == "gpt":
        made: Layer = gpt.Block(gpt_config(width=WIDTH, heads=4))
    else:
        norm = "pre" if kind == "pre-LN" else "post"
        made = bert.Block(BertConfig(layers=1, width=WIDTH, heads=4, sequence_length=16, vocab_size=50, norm=norm))
    return nn.ModuleList([made.double()])


def outputs(some: nn.ModuleList, kind: str, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What the layer makes of so many tokens, and gradients of it, of the input too, as each worker has them."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.randn(2, tokens, WIDTH, dtype=torch.float64, generator=generator)
    some.zero_grad()
    if kind == "gpt":
        positions = torch.randperm(16, generator=generator)[:tokens].sort().values
        angles = [one[:, positions].expand(2, -1, -1) for one in gpt.rotary_angles(16, WIDTH // 4, x)]
        out = some[0](x, tuple(angles))
    else:
        mask = torch.rand(2, 1, 1, tokens, generator=generator) > 0.2
        out = some[0](x, mask)
    (out * weights).sum().backward()
    assert x.grad is not None
    return out.detach(), {"x": x.grad} | {name: whole(p.grad) for name, p in some.named_parameters()}


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare(shared: str) -> None:
    """In every worker of a group."""
    size = dist.get_world_size()
    group = init_device_mesh("cpu", (size,))
    for kind in ("gpt", "post-LN", "pre-LN"):
        ours, plain = layers(kind), layers(kind)
        recompute_layers(ours, again=kind == "pre-LN")
        SHARING[shared](ours, group)
        for tokens in (1, 5, 8, 13):
            (out, found), (expected, of_plain) = outputs(ours, kind, tokens), outputs(plain, kind, tokens)
            torch.testing.assert_close(out, expected, rtol=FLOAT64, atol=FLOAT64)
            for name, gradient in found.items():
                if shared == "tokens":  # of each worker's own part of the loss
                    dist.all_reduce(gradient.div_(size))
                elif QKV in f".{name}":
                    found[name] = by_kind(gradient, size)
            assert_same(found, of_plain, tolerance=FLOAT64)


@pytest.mark.parametrize("shared", SHARING)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_shared_layer_is_the_plain_one(workers: int, shared: str) -> None:
    together(workers, compare, shared)


def step_with_gradients_that_differ() -> None:
    """Of what both workers of a group have whole, as those of two GPUs differ by rounding."""
    config = experiment(train__tensor_parallel=2, scaling__workers=2)
    engine, _ = build_engine(config, torch.device("cpu"))
    batch = next(Rows(config, world_size=2, rank=dist.get_rank()).of_step(0))
    engine.forward_backward(batch, share=1.0, last_micro_batch=True)
    whole_on_both = [one for name, one in engine.model.named_parameters() if not name.endswith(SHARED_OUT)]
    assert len(whole_on_both) == 2 + 2 + 4 * (4 + 2)  # embeddings, last norm; of 4 layers norms, biases of out and down
    for parameter in whole_on_both:
        assert isinstance(parameter.grad, DTensor)
        parameter.grad.to_local().mul_(1 + 1e-3 * dist.get_rank())
    engine.step(lr=0.01, max_grad_norm=1.0)
    for parameter in whole_on_both:
        assert isinstance(parameter, DTensor)
        own = parameter.to_local().detach()
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        assert torch.equal(*both)


def test_what_all_of_a_group_have_whole_stays_the_same_where_their_gradients_differ() -> None:
    together(2, step_with_gradients_that_differ)


@pytest.mark.parametrize("share", SHARING.values())
def test_layers_of_others_are_refused(share: Callable[..., None]) -> None:
    with pytest.raises(UserError, match=r"_parallel: want the layers of our GPT or BERT .*, got Linear"):
        share(nn.ModuleList([nn.Linear(2, 2)]), None)
