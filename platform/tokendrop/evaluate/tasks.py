"""lm-eval's tasks by name or by file, found and loaded without a network."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import huggingface_hub
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from tokendrop.config.files import is_task_file
from tokendrop.errors import UserError
from tokendrop.evaluate import squad_metrics
from tokendrop.evaluate.suites import SUITES
from tokendrop.evaluate.task_data import members_of, on_local_files, task_name
from tokendrop.secrets import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated, and how."""

    tasks: Sequence[str] = ()
    """Names that lm-eval or the task files below `include` know, or paths of task files; without any, held-out rows
    alone."""
    suite: str | None = None
    """A name of `SUITES`: its tasks beside the others, and their average."""
    include: Path | None = None
    task_data: Path | None = None
    """A folder of documents as TASK/SPLIT.jsonl, in the place of what these tasks name on the hub."""
    limit: int | None = None
    """Documents of each task; all when left out."""
    batch_size: int | None = None
    """Whole sequences of a forward pass of a task; by a budget of tokens when left out."""
    log_samples: bool = False
    """Write down each request of the tasks, and what came of it."""
    validates: bool = True
    """Read the held-out rows too."""

    @property
    def all_tasks(self) -> list[str]:
        """Its tasks and those of its suite."""
        return list(dict.fromkeys([*self.tasks, *(SUITES[self.suite] if self.suite else ())]))


class Tasks(TaskManager):
    """lm-eval's tasks; one that can't be loaded is the user's mistake."""

    task_data: Path | None = None
    """As in `Evaluation`."""

    def load(self, task_list: Any) -> TaskDict:
        """The tasks and groups of these names or files.

        Raises:
            UserError: a task file is wrong, or a task's data is not at hand.
        """
        own = dict(self.task_index)
        try:
            with TemporaryDirectory() as folder:
                return super().load([self._on_local_files(one, Path(folder)) for one in task_list])
        except UserError:
            raise
        except Exception as error:  # whatever a task's YAML, its functions and the data's reader raise
            reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            offline = isinstance(error, ConnectionError) and os.environ.get("HF_HUB_OFFLINE") == "1"
            hint = "; set HF_HUB_OFFLINE=0 to let lm-eval download what is not on this machine" if offline else ""
            raise UserError(f"tasks: can't load {', '.join(map(str, task_list))} ({reason}){hint}") from None
        finally:
            self.task_index.update(own)

    def _on_local_files(self, spec: str, folder: Path) -> str:
        """A task by its name, or by a file; where its documents are at hand, the index has a file that reads those."""
        if spec not in self.task_index:
            name = task_name(Path(spec))
            return str(self._variant(name, Path(spec), folder) or spec)
        for name in set(self._tasks_of(spec)):
            entry = self.task_index[name]
            if entry.yaml_path and (variant := self._variant(name, entry.yaml_path, folder)):
                self.task_index[name] = replace(entry, yaml_path=variant)
        return spec

    def _variant(self, task: str, file: Path, folder: Path) -> Path | None:
        documents = self.task_data and self.task_data / task
        return on_local_files(task, file, documents, folder) if documents and documents.is_dir() else None

    def _tasks_of(self, name: str) -> Iterator[str]:
        """The tasks that a name stands for: of a group or a tag, those in it."""
        if name in self.all_tags:
            yield from self.task_index[name].tags
        elif name in self.all_groups:
            for member in members_of(self.task_index[name].cfg or {}):
                yield from self._tasks_of(member)
        elif name in self.task_index:
            yield name


def find_tasks(tasks: Sequence[str], include: Path | None, task_data: Path | None = None) -> tuple[Tasks, list[str]]:
    """What loads the tasks, and their names as it knows them.

    Args:
        tasks: names, or paths of task files.
        include: a folder of task files, each with its own `task:` name.
        task_data: as in `Evaluation`.
    Raises:
        UserError: a name, a file or a folder does not exist.
    """
    stay_offline()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every default that its own task files rely on
    squad_metrics.stand_in()
    if not tasks:
        raise UserError("tasks: want at least one, such as --tasks lambada_openai,piqa")
    if include is not None and not include.is_dir():
        raise UserError(f"include: {include} is not a folder; want one that holds task files (.yaml)")
    if task_data is not None and not task_data.is_dir():
        raise UserError(f"--task-data: {task_data} is not a folder; want one that holds TASK/SPLIT.jsonl")
    files = {task: Path(task).resolve() for task in tasks if is_task_file(task)}
    for file, path in files.items():
        if not path.is_file():
            raise UserError(f"tasks: there is no task file {file}")
    groups = {file: name for file, path in files.items() if (name := group_name(path))}
    # A task's file stands for itself; a group's members are found by name, beside it to begin with.
    specs = [groups.get(task) or str(files.get(task, task)) for task in tasks]
    names = [task for task in tasks if task not in files]
    folders = [*({include} - {None}), *{files[file].parent for file in groups}]
    # lm-eval's own tasks are 15,000 files, read in seconds, so they are left out where nobody asks for them.
    # A group may name them in turn.
    manager = Tasks(include_path=folders, include_defaults=False)
    if groups or not set(names) <= {*manager.all_subtasks, *manager.all_tags}:
        manager = Tasks(include_path=folders)
    manager.task_data = task_data and task_data.resolve()
    for name in names:
        if name not in manager.task_index:
            near = get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "want a name that lm-eval knows, or a .yaml file"
            raise UserError(f"tasks: unknown task {name!r}; {hint}")
    return manager, specs


def group_name(file: Path) -> str | None:
    """The name in a task file that lists other tasks; None in one that is a task itself."""
    found = re.search(r"^group: *[\"']?([^\s\"']+)", file.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None


def stay_offline() -> None:
    """Look for task data on this machine alone, unless HF_HUB_OFFLINE says otherwise.

    Both libraries read the variable once, when they are first imported, which may have been long ago.
    """
    if "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
