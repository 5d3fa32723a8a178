"""What makes two trials the same run: everything that decides what is trained and measured, nothing of where."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from tokendrop.config import plugin
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.secrets import redact
from tokendrop.track.parameters import flat

WHERE = (
    *("name", "run", "runs_folder", "scaling", "checkpoint", "track"),
    *("data.folder", "data.cache", "data.reader", "data.max_rejected", "train.profile"),
    "train.tokens_per_micro_batch",  # how many samples run at a time, the same ones with the same draws
    "train.fp8_emulated",
    # how many workers train a micro batch together, to the same losses
    *("train.tensor_parallel", "train.context_parallel"),
    "model.preset",  # whose sizes are keys of their own
)
"""Keys, and branches with all their keys, that say where a trial runs, how it is saved and how it is called."""
_UNUSED = {"train.fp8": "None", "train.cuda_graphs": "False", "train.attention": "auto"}
"""Keys that are younger than some trials, with the values that change nothing: then they do not count, so that those
trials keep their names."""
_LETTERS = 12


def says_only_where(key: str) -> bool:
    """Whether a dotted key is one of `WHERE`, or below one."""
    return any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in WHERE)


def settings_of(config: ExperimentConfig) -> dict[str, str]:
    """All settings of a job that make it another run, by dotted key.

    Paths count as the job has them, what is in a corpus or behind `model.init_from` does not; of a method or a task in
    a file of the user's own, the file's content counts.
    """
    settings = flat(asdict(config)).items()
    found = {k: redact(value) for k, value in settings if not says_only_where(k) and _UNUSED.get(k) != value}
    for key, name in (("drop.method", config.drop.method), ("task.kind", config.task.kind)):
        if content := plugin.content_of(name):
            found[content_key(key)] = content
    return dict(sorted(found.items()))


def content_key(key: str) -> str:
    """Of the settings: where the content of the file is that a key of the job names."""
    return f"{key} (content)"


def run_name(settings: Mapping[str, str]) -> str:
    """The name of the run folder of a trial with these settings."""
    text = json.dumps(dict(sorted(settings.items())))
    return f"trial-{hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]}"


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Keys whose values make two trials different runs, with both values; None where a trial has no such key."""
    keys = dict.fromkeys([*one, *other])
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}
