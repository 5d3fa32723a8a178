"""lm-eval's tasks on documents in local files, in the place of those that they name on the hub."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tokendrop.errors import UserError

_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_JUDGED = _SPLITS[1:3]


class _Reader(yaml.SafeLoader):
    """Reads task files without the functions that they name."""


_Reader.add_multi_constructor("!", lambda *_: None)


def on_local_files(task: str, file: Path, documents: Path, to: Path) -> Path:
    """A task file that is another one with its documents from `documents`/SPLIT.jsonl.

    Args:
        file: of the task.
        to: the folder that it is written into.
    Raises:
        UserError: there are no documents of a split that the task is judged on.
    """
    splits = _splits_of(file)
    here = {name: documents / f"{name}.jsonl" for name in splits.values() if name}
    here = {name: path for name, path in here.items() if path.is_file()}
    if not any(splits.get(key) in here for key in _JUDGED):
        wanted = " or ".join(f"{splits[key]}.jsonl" for key in _JUDGED if splits.get(key))
        raise UserError(f"--task-data: {documents} has no documents of {task}; want {wanted}")
    changed = {
        "include": str(file),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {name: str(path) for name, path in here.items()}},
        **{key: name if name in here else None for key, name in splits.items()},
    }
    path = to / f"{task}.yaml"
    path.write_text(yaml.safe_dump(changed))
    return path


def task_name(file: Path) -> str:
    """The name that a task file gives its task; that of the file where it gives none."""
    settings = yaml.load(file.read_text(), _Reader)
    return str(settings.get("task") or file.stem)


def members_of(group: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tasks, groups and tags in the settings of a group, also of those in groups that it writes out."""
    listed = group.get("task") or ()
    for one in [listed] if isinstance(listed, str) else listed:
        if isinstance(one, str):
            yield one
        elif isinstance(one.get("task"), list):
            yield from members_of(one)
        else:
            yield str(one.get("task") or one["group"])


def _splits_of(file: Path) -> Mapping[str, str | None]:
    """The names of a task's splits, by key; its own, and those of the files that it includes."""
    settings: dict[str, Any] = yaml.load(file.read_text(), _Reader)
    includes = settings.get("include") or []
    found: dict[str, str | None] = {}
    for one in [includes] if isinstance(includes, str) else includes:
        found |= _splits_of(file.parent / one)
    return found | {key: settings[key] for key in _SPLITS if key in settings}
