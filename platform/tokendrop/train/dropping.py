"""A job's method of dropping on its model: layers that drop tokens, and a loss that its router learns by."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.method import Dropping, TokenScores, attach, routes_along
from tokendrop.models.batch import Batch
from tokendrop.models.layer import hands_on_once
from tokendrop.schedule.plan import RunPlan
from tokendrop.train.task import Loss, LossFunction


def attach_method(config: ExperimentConfig, model: nn.Module, layers: nn.ModuleList) -> Dropping | None:
    """Let the layers of a job's model drop tokens; None where none does.

    Raises:
        UserError: the method says of itself that it has a learned router, and has none, or has one and does not say so.
    """
    spans = config.drop.spans(len(layers))
    if not spans or config.drop.cuts:
        return None
    selector = config.drop.selector_of(width=config.model.shape.width, layers=len(layers), seed=config.seed)
    routes, in_place = routes_along(spans, selector), hands_on_once(model)
    dropping = attach(model, seed=config.seed, routes=routes, blocks=[*layers], in_place=in_place)
    if dropping.learns != config.drop.learns:  # by which runs are planned, loaded and exported
        raise UserError(
            f"drop.method: {config.drop.method} {'has a' if dropping.learns else 'has no'} learned router; want"
            f" `learns = {dropping.learns}` in its class"
        )
    return dropping


def draw(
    config: ExperimentConfig,
    plan: RunPlan,
    dropping: Dropping,
    batch: Batch,
    *,
    step: int,
    kept: Mapping[int, int],
    scores: TokenScores | None = None,
) -> None:
    """Choose what the next forward pass of a micro batch keeps.

    Args:
        kept: of each route, by the number of its first layer.
        scores: the running losses of tokens, where the job's method chooses by them.
    """
    special_BS = batch.special_BS if config.drop.keeps_special else None
    dropping.draw(
        kept_length=kept,
        step=step,
        sample_ids=batch.sample_ids_B,
        sequence_length=plan.shape.sequence_length,
        device=batch.device,
        places=[place for number in batch.numbers for place in plan.batch.places(number)],
        global_batch=plan.batch.global_batch,
        always=() if special_BS is None else special_BS,
        scores=None if scores is None else scores.of(batch.inputs()["input_ids_BS"]),
    )


@contextmanager
def dropping_in_evaluation(dropping: Dropping) -> Iterator[None]:
    """Within the block, layers drop what was drawn outside of training too."""
    dropping.drops_in_evaluation = True
    try:
        yield
    finally:
        dropping.drops_in_evaluation = False


def with_added_loss(loss: LossFunction, dropping: Dropping | None) -> LossFunction:
    """A task's loss, with the gradients of what a learned router adds to it.

    The value stays the task's, so that runs of all methods tell the same.
    """
    if dropping is None or not dropping.learns:
        return loss

    def both(model: nn.Module, batch: Batch) -> Loss:
        found = loss(model, batch)
        if not model.training:
            return found
        added = dropping.added_loss()
        return replace(found, mean=found.mean + (added - added.detach()))

    return both
