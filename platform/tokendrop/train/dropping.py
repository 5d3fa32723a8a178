"""A job's method of dropping on its model: layers that drop tokens, and a loss that its router learns by."""

from dataclasses import replace

from torch import nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.method import Dropping, attach, routes_along
from tokendrop.models.batch import Batch
from tokendrop.train.task import Loss, LossFunction


def attach_method(config: ExperimentConfig, model: nn.Module, layers: nn.ModuleList) -> Dropping | None:
    """Let the layers of a job's model drop tokens; None where none does."""
    spans = config.drop.spans(len(layers))
    if not spans or config.drop.cuts:
        return None
    selector = config.drop.selector_of(width=config.model.shape.width, layers=len(layers), seed=config.seed)
    return attach(model, seed=config.seed, routes=routes_along(spans, selector), blocks=[*layers])


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
