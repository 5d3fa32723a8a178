"""Ray Train without the helpers that a run has no use for."""

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback

from tokendrop.launch.cluster import serves_alone


class QuietTorchTrainer(TorchTrainer):
    """`TorchTrainer` that starts only the actors its run needs.

    Ray wakes every actor's process a hundred times a second, idle or not: 1% of a core each, taken from the cores
    that train, and where one thread of a matrix product waits the others wait with it.
    """

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        useless: list[type[RayTrainCallback]] = []
        if not self.datasets:
            useless.append(DatasetsCallback)
        if serves_alone():  # the placement group that the cleaner would free goes with the cluster
            useless.append(PlacementGroupCleanerCallback)
        return [callback for callback in super()._create_default_callbacks() if type(callback) not in useless]
