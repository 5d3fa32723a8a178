"""Notices that nodes of a run will go, as its workers hear of them."""

import ray.train


class DrainNotice:
    """Whether a node of this run has been told to go since this was last asked; all ranks ask at once.

    Ray goes on with the workers there until the node's deadline, and restarts the run without it. Before 2.58, it
    tells nobody.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self) -> bool:
        if not hasattr(ray.train, "get_preemption_info"):
            return False
        notice = ray.train.get_preemption_info()
        new = set(notice.preempted_node_ids if notice else ()) - self._known
        self._known |= new
        return bool(new)
