"""The Ray cluster at hand: the one that is there, or one for this process."""

import logging
import os
from pathlib import Path

import ray

_SOURCE_ROOT = Path(__file__).parents[2]


def connect(address: str | None = None, *, cpus: int | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS; without either, start one on this machine. Does nothing twice.

    Workers get this source tree on their path, so a cluster whose image holds the dependencies alone will do.

    Args:
        cpus: cores that a cluster started here counts; those of the machine when left out.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    path = os.pathsep.join(filter(None, [str(_SOURCE_ROOT), os.environ.get("PYTHONPATH")]))
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    for name in ("ray.data", "ray.train", "mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address, runtime_env={"env_vars": {"PYTHONPATH": path}}, **quiet)
        return
    os.environ["PYTHONPATH"] = path
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nothing but this process can reach it
    ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=400 * 2**20, **quiet)
