"""One optimizer step: groups, accumulation, clipping, evaluation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny import TOKENS, Rows, assert_same, experiment, gpt, loss_of, rows_of
from tokendrop.method import Dropping, attach
from tokendrop.models.batch import Batch
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizers

EXACT = 1e-12  # float64; the order of additions may differ


def engine(**changes: object) -> DdpEngine:
    model = gpt(**changes)
    return DdpEngine(model, build_optimizers(model, experiment().train), torch.float64, loss=loss_of)


def with_cuda_graphs() -> DdpEngine:
    """Of layers that would run as such on a GPU."""
    model = gpt()
    optimizers = build_optimizers(model, experiment().train)
    return DdpEngine(model, optimizers, torch.float64, loss=loss_of, cuda_graphs=True)


def draw(dropping: Dropping, batch: Batch) -> None:
    dropping.draw(kept_length=5, step=3, sample_ids=batch.sample_ids_B, sequence_length=TOKENS)


def accumulated(dropping: Dropping | None, one: DdpEngine, sizes: list[int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of samples 0..11 in micro batches of these sizes, and their losses."""
    losses, first = [], 0
    for size in sizes:
        batch = rows_of(range(first, first + size))
        if dropping is not None:
            draw(dropping, batch)
        last = first + size == sum(sizes)
        losses.append(one.forward_backward(batch, share=size / sum(sizes), last_micro_batch=last).mean)
        first += size
    return {name: p.grad.clone() for name, p in one.model.named_parameters() if p.grad is not None}, losses


@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropping"])
@pytest.mark.parametrize("sizes", [[6, 6], [4, 4, 4], [1] * 12])
def test_accumulated_gradients_are_those_of_one_large_batch(sizes: list[int], drops: bool) -> None:
    """With drops too, for a sample's kept tokens do not depend on its micro batch."""
    found = []
    for split in ([12], sizes):
        one = engine()
        dropping = attach(one.model, seed=1) if drops else None
        found.append(accumulated(dropping, one, split))
    assert_same(found[0][0], found[1][0], tolerance=EXACT)
    torch.testing.assert_close(torch.stack(found[1][1]).mean(), found[0][1][0], rtol=EXACT, atol=EXACT)


def test_with_cuda_graphs_gradients_stay_where_they_are() -> None:
    """What a graph gave for the micro batch before is written over by the next."""
    graphs, plain = with_cuda_graphs(), engine()
    model = graphs.model
    model.blocks[1].requires_grad_(False)
    plain.model.blocks[1].requires_grad_(False)
    places = None
    for _ in range(3):
        found = [accumulated(None, one, [4, 4, 4])[0] for one in (graphs, plain)]
        assert_same(*found)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        places = places or {name: p.grad.data_ptr() for name, p in trained.items()}
        for one in (graphs, plain):
            one.step(lr=0.01, max_grad_norm=1.0)
        assert {name: p.grad.data_ptr() for name, p in trained.items()} == places
        assert not any(p.grad.any() for p in trained.values())
    assert_same(dict(model.state_dict()), dict(plain.model.state_dict()))


def test_with_cuda_graphs_a_checkpoint_gives_the_moments_back(tmp_path: Path) -> None:
    saved, restored = with_cuda_graphs(), with_cuda_graphs()
    for step in (1, 2):
        accumulated(None, saved, [12])
        saved.step(lr=0.01 * step, max_grad_norm=1.0)
    checkpoints = Checkpoints(tmp_path, keep=1, meta={"name": "tiny"})
    checkpoints.save(saved, 2)
    checkpoints.wait()
    newest = checkpoints.newest()
    assert newest is not None
    assert checkpoints.load(restored, newest) == 2
    for one in (saved, restored):
        accumulated(None, one, [12])
        one.step(lr=0.01, max_grad_norm=1.0)
    assert_same(dict(restored.model.state_dict()), dict(saved.model.state_dict()))


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = gpt()
    (adamw,) = build_optimizers(model, experiment(train__weight_decay=0.3).train)
    decaying, others = adamw.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [{names[id(parameter)] for parameter in group["params"]} for group in (decaying, others)]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert grouped[0] | grouped[1] == set(names.values())
    assert not grouped[0] & grouped[1]
    assert all(name.endswith("bias") or "norm" in name for name in grouped[1])
    assert not any(name.endswith("bias") or "norm" in name for name in grouped[0])
    assert sum(len(group["params"]) for group in (decaying, others)) == len(names)


def test_a_step_is_adamws_on_clipped_gradients_at_the_rate_that_it_is_given() -> None:
    ours, theirs = engine(), engine()
    for one in (ours, theirs):
        accumulated(None, one, [12])
    norm = torch.stack([p.grad.norm() for p in theirs.model.parameters()]).norm()
    for parameter in theirs.model.parameters():
        parameter.grad.mul_(0.1 / norm)
    (by_hand,) = build_optimizers(theirs.model, experiment(train__peak_lr=0.02).train)
    by_hand.step()

    reported = ours.step(lr=0.02, max_grad_norm=0.1)

    torch.testing.assert_close(reported, norm, rtol=EXACT, atol=EXACT)
    tolerance = 1e-6  # clipping adds 1e-6 to the norm that it divides by
    assert_same(dict(ours.model.state_dict()), dict(theirs.model.state_dict()), tolerance=tolerance)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_evaluation_drops_nothing_keeps_no_graph_and_goes_back_to_training() -> None:
    plain, one = engine(), engine()
    batch = rows_of(range(4))
    draw(attach(one.model, seed=1), batch)
    loss = one.evaluate(batch).mean
    assert torch.equal(loss, plain.model(batch.input_ids_BS, batch.labels_BS))
    assert not loss.requires_grad
    assert one.model.training
    assert all(module.training for module in one.model.modules())


def test_a_worker_alone_is_the_mean_of_all_workers() -> None:
    assert engine().mean(torch.tensor(3.5)) == 3.5


def test_the_rows_of_these_tests_are_shared_out_as_the_plan_says() -> None:
    config = experiment()
    alone = [batch.sample_ids_B for batch in Rows(config).of_step(3)]
    two = [list(Rows(config, world_size=2, rank=rank).of_step(3)) for rank in range(2)]
    assert torch.cat(alone).tolist() == list(range(24, 32))
    assert [batches[0].sample_ids_B.tolist() for batches in two] == [ids.tolist() for ids in alone]
