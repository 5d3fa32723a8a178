"""Layers whose tokens a group of workers shares out, by torch's DTensor.

What goes in and out of a layer is the whole sequence, or its kept tokens, on all workers of a group. Within the layer
each has as many of these tokens as the others, in their order, and attends to the keys and values of all of them. So
whatever stands between layers does not see that they are shared, and the kept tokens of every draw are spread evenly.

Every worker of a group gives the same loss, each from its own copy of the weights: a mean of the gradients over all
workers is the gradient of that loss. What a worker's tokens add to a loss of another comes back in the backward pass.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tokendrop.errors import UserError
from tokendrop.models.layer import Layer

# Dimensions: B micro batch, S tokens of a layer, P of them on each worker, the last ones filled up with zeros, D width.


class MeshGroup:
    """A `TokenGroup` of workers of a device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """
        Args:
            mesh: of the workers, one dimension.
        """
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()

    def own(self, whole_BSD: Tensor) -> Tensor:
        tokens = whole_BSD.shape[1]
        each = -(-tokens // self.size)
        mine_BPD = whole_BSD[:, self.rank * each : (self.rank + 1) * each]
        # a copy, for what autograd keeps of a slice is all that it is cut from
        return F.pad(mine_BPD, (0, 0, 0, each - mine_BPD.shape[1])) if mine_BPD.shape[1] < each else mine_BPD.clone()

    def whole(self, own: Tensor, *, dim: int) -> Tensor:
        parts = DTensor.from_local(own, self.mesh, [Shard(dim)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def share_tokens(layers: nn.ModuleList, group: DeviceMesh) -> None:
    """Share the tokens of layers out, in place.

    Raises:
        UserError: these are not the layers of our GPT or BERT.
    """
    for layer in layers:
        if not isinstance(layer, Layer) or not layer.shares_tokens:
            raise UserError(
                f"train.context_parallel: want the layers of our GPT or BERT to share out, got {type(layer).__name__}"
            )
        layer.token_group = MeshGroup(group)
