"""One model under one strategy: what the loop asks of it."""

from typing import Any, Protocol

from torch import Tensor, nn

from tokendrop.models.batch import Batch
from tokendrop.train.reader import CheckpointReader
from tokendrop.train.task import Loss


class Engine(Protocol):
    """Runs a model over all workers; the loop knows nothing else of strategies."""

    model: nn.Module
    """The plain model, with its own parameter names."""

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        """Add the gradients of `share` x the batch's mean loss; the last micro batch averages them over the workers.

        Returns:
            The loss, detached.
        """
        ...

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update, forget the gradients; the gradient norm before clipping."""
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss with no token dropped."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a scalar over the workers."""
        ...

    def add_up(self, value: Tensor) -> None:
        """Add a tensor up over the workers, in place."""
        ...

    def state(self) -> dict[str, Any]:
        """What this worker saves: `model` and `optimizer`, under the plain model's parameter names.

        What the workers save together is the same for every strategy and world size: torch's own state dictionaries,
        tensors alone. The optimizer's settings are the job's.
        """
        ...

    def load(self, reader: CheckpointReader) -> None:
        """Go on from a checkpoint of any strategy and world size; before the first step, and on all workers."""
        ...
