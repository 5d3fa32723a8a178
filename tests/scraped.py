"""What Ray's agents export, as Prometheus reads it."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, tuple[tuple[str, str], ...]]
OURS = "ray_tokendrop_"
TAGS = ("run", "sweep", "rank", "part", "state", "metric", "job_name")


def targets() -> list[str]:
    """Where the nodes of this process's Ray export."""
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def exported(**tags: str) -> dict[Sample, float]:
    """Our series that have these tags: by name and tags, without those that Ray adds."""
    found: dict[Sample, float] = {}
    for target in targets():
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(OURS) and tags.items() <= sample.labels.items():
                    ours = {key: value for key, value in sample.labels.items() if key in TAGS}
                    found[sample.name, tuple(sorted(ours.items()))] = sample.value
    return found


@contextmanager
def watching(**tags: str) -> Iterator[dict[Sample, float]]:
    """The last value of each series that is exported while the block runs."""
    ended, found = threading.Event(), dict[Sample, float]()

    def watch() -> None:
        while not ended.wait(1):
            found.update(exported(**tags))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join(20)
