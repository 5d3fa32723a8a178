"""Room for a run's workers on the cluster: whether there can be any, and what of it is free."""

import ray
from ray.util import placement_group_table

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import ScalingConfig
from tokendrop.errors import UserError
from tokendrop.launch.cluster import is_on_this_machine_alone
from tokendrop.output import log

Resources = dict[str, float]

_NEXT_TO_NOTHING = 0.001  # as Ray's own `accelerator_type` takes
_RAY = "2.60."  # whose scaling policies `tokendrop.elastic` knows


def check_ray(scaling: ScalingConfig) -> None:
    """Raises UserError where the job's mode does not work with the Ray that is installed."""
    if scaling.mode == "schedule" and not ray.__version__.startswith(_RAY):
        raise UserError(
            f"scaling.mode: 'schedule' works with Ray {_RAY}*, this is Ray {ray.__version__};"
            " want scaling.mode: fit_per_segment, which changes workers at the same steps"
        )


def check_room(config: ExperimentConfig) -> None:
    """Raises UserError where this machine, as a cluster of its own, could never hold the run's workers."""
    if not is_on_this_machine_alone():
        return  # nodes may join it; how many is not to be known from here, and the run says what it waits for
    scaling, total, each = config.scaling, ray.cluster_resources(), resources_of(config.scaling)
    if missing := ", ".join(one for one in kinds_of(scaling) if one not in total):
        raise UserError(
            f"scaling: no node of this cluster has {missing}; leave accelerator and market out, or run where nodes have"
            " it"
        )
    most = config.most_workers
    least = legal_sizes(config)[0] if scaling.mode == "schedule" else most
    workers = "scaling.workers" if scaling.mode == "fixed" else "the workers of the plan"
    for resource, amount in _counted(each).items():
        key, has = f"scaling.{resource.lower()}s_per_worker", total.get(resource, 0)
        if least * amount > has:
            raise UserError(
                f"scaling: {least} workers want {least * amount:g} {resource}s, this cluster has {has:g};"
                f" lower {workers} or {key}"
            )
        if most * amount > has:
            log(f"note     the plan has up to {most} workers, this cluster has {resource}s for {int(has // amount)}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if (places := count_places(nodes, each)) < least:
        sizes = ", ".join(f"{node.get('CPU', 0):g}" for node in nodes)
        raise UserError(
            f"scaling: {least} workers of {text_of(each)} each want a node for each; this cluster's nodes, of {sizes}"
            f" CPUs, hold {places}; lower {workers} or what each of them takes"
        )


def legal_sizes(config: ExperimentConfig) -> list[int]:
    """Numbers of workers that a run with `mode: schedule` may have, rising."""
    return config.fixed_plan.batch.world_sizes(config.scaling.min_workers, config.scaling.most_workers)


def resources_of(scaling: ScalingConfig) -> Resources:
    """What one worker takes.

    Ray has a kind of GPU as a resource, of which a node has 1 and a worker takes next to nothing; here so has a market.
    Not labels: Ray's coordinator, which keeps nodes for elastic runs, does not look at those.
    """
    gpus: Resources = {"GPU": scaling.gpus_per_worker} if scaling.gpus_per_worker else {}
    return {"CPU": scaling.cpus_per_worker} | gpus | dict.fromkeys(kinds_of(scaling), _NEXT_TO_NOTHING)


def kinds_of(scaling: ScalingConfig) -> list[str]:
    """The resources that only nodes of the right kind have."""
    kinds = {"accelerator_type": scaling.accelerator, "market": scaling.market}
    return [f"{name}:{kind}" for name, kind in kinds.items() if kind]


def _counted(each: Resources) -> Resources:
    """What is used up; without kinds of nodes."""
    return {name: amount for name, amount in each.items() if ":" not in name}


def count_places(nodes: list[Resources], each: Resources) -> int:
    """Workers that fit on nodes, each of them on one."""
    return sum(int(min(node.get(name, 0) // amount for name, amount in each.items())) for node in nodes)


def text_of(resources: Resources) -> str:
    """Resources as people read them: `2 CPUs and 1 GPU (H100, spot)`."""
    counted = _counted(resources)
    kinds = ", ".join(name.partition(":")[2] for name in resources if name not in counted)
    text = " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in counted.items())
    return f"{text} ({kinds})" if kinds else text


def waiting_text(workers: int, each: Resources) -> str:
    """What workers that have not started wait for, as far as the cluster tells."""
    bundles = [{name: float(amount) for name, amount in each.items()}] * workers
    mine = [group["state"] for group in placement_group_table().values() if [*group["bundles"].values()] == bundles]
    who = f"{workers} worker{'s' * (workers != 1)}"
    if not mine:
        return f"waiting  for Ray Train to ask for {who}"
    if "CREATED" in mine and "PENDING" not in mine:
        return f"waiting  for the processes of {who} to start"
    free, total = ray.available_resources(), ray.cluster_resources()
    if missing := [one for one in each if ":" in one and one not in total]:
        return f"waiting  for a node with {', '.join(missing)}: {who} of {text_of(each)} each"
    counts = " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in _counted(each))
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"waiting  for room: {who} of {text_of(each)} each; {counts} are free on {nodes} node{'s' * (nodes != 1)}"
