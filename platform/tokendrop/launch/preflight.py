"""What is checked before a job is submitted: that everything it needs is uploaded, and nothing that is too much."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pathspec import PathSpec

from tokendrop.config import plugin
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_task_file, read_mapping
from tokendrop.data.corpus.sources import list_files
from tokendrop.errors import UserError, first_line
from tokendrop.launch.results import absolute_in
from tokendrop.output import log
from tokendrop.secrets import redact

DRIVER = Path("jobs/run.py")
LEFT_OUT = [".git", ".venv", "venv", "__pycache__"]
MIB = 2**20

_IGNORE_GITIGNORE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"  # an environment variable that Ray documents

_MOST_BYTES = 100 * MIB  # the most that Ray's dashboard takes in one request


@dataclass(frozen=True, slots=True)
class Upload:
    """What Ray takes of a working folder: relative paths and their bytes."""

    folder: Path
    sizes: dict[Path, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, before Ray packs them."""
        return sum(self.sizes.values())

    def check_holds(self, path: str | Path, what: str) -> Path:
        """`path` relative to the folder; raises UserError, which begins with `what`, where it would not be uploaded."""
        inside = _relative(path, self.folder)
        if inside is None:
            raise UserError(f"{what} {path} lies outside of --working-dir {self.folder}, which is what is uploaded")
        if not (self.folder / inside).is_file():
            want = "a checkout of tokendrop" if inside == DRIVER else "a file in it"
            raise UserError(f"{what} {path}: no {inside} in --working-dir {self.folder}; want {want}")
        if inside not in self.sizes:
            raise UserError(f"{what} {path} is left out of the upload by a .gitignore or .rayignore in {self.folder}")
        return inside


def list_upload(working_dir: str) -> Upload:
    """The files that Ray would upload: by the rules that it documents, .gitignore and .rayignore among them.

    Raises:
        UserError: there is no such folder, or one of those files is not right.
    """
    folder = Path(os.path.abspath(working_dir))
    if not folder.is_dir():
        raise UserError(f"--working-dir {working_dir}: no such folder")
    excludes = (folder, PathSpec.from_lines("gitignore", LEFT_OUT))
    return Upload(folder, {path.relative_to(folder): path.stat().st_size for path in _uploaded(folder, (excludes,))})


def _uploaded(path: Path, rules: tuple[tuple[Path, PathSpec], ...]) -> Iterator[Path]:
    """Files at or below `path` that no rule leaves out; a rule holds below the folder of its file."""
    for file in (path / ".gitignore", path / ".rayignore"):
        if file.is_file() and (file.name == ".rayignore" or os.environ.get(_IGNORE_GITIGNORE) != "1"):
            try:
                rules += ((path, PathSpec.from_lines("gitignore", file.read_text().splitlines())),)
            except ValueError as error:
                raise UserError(f"{file}: want the patterns of a .gitignore ({first_line(error)})") from None
    if any(patterns.match_file(path.relative_to(folder)) for folder, patterns in rules):
        return
    if path.is_dir():
        for inside in path.iterdir():
            yield from _uploaded(inside, rules)
    elif path.is_file():
        yield path


def check_job_files(job: str, config: ExperimentConfig, upload: Upload) -> Path:
    """The job file relative to the working folder.

    Raises:
        UserError: it, its base, the driver or the file of the user's own method or task would not be uploaded.
    """
    upload.check_holds(upload.folder / DRIVER, "the driver")
    inside = upload.check_holds(job, "the job file")
    base = read_mapping(Path(job), "job file", keys="'model:'").get("base")
    if base is not None:
        upload.check_holds(Path(job).parent / base, f"{job}: base:")
    for key, name in (("drop.method", config.drop.method), ("task.kind", config.task.kind)):
        if file := plugin.file_of(name):
            if file.is_absolute():
                raise UserError(f"{key}: {file}: want a path from --working-dir on, as it is on the cluster")
            upload.check_holds(upload.folder / file, f"{key}:")
    return inside


def check_size(upload: Upload) -> None:
    """Raises UserError, which names the largest files, where the upload is more than a dashboard takes."""
    if upload.size_bytes >= _MOST_BYTES:
        largest = sorted(upload.sizes.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{path} ({size / MIB:.0f} MiB)" for path, size in largest)
        raise UserError(
            f"--working-dir {upload.folder}: {upload.size_bytes / MIB:.0f} MiB to upload, and Ray takes less than"
            f" {_MOST_BYTES // MIB}; name what the job does not need in .gitignore or .rayignore: {named}"
        )


def absolute_paths(config: ExperimentConfig, folder: Path) -> list[str]:
    """Overrides by which the job reads and writes in the working folder, not in Ray's copy of it."""
    before, after = _paths(config), _paths(absolute_in(config, folder))
    return [f"{key}={json.dumps(after[key], ensure_ascii=False)}" for key in before if before[key] != after[key]]


def check_secrets(overrides: Sequence[str]) -> None:
    """Raises UserError where the job's command line would hold a secret: Ray shows it, and keeps it, for everybody."""
    for override in overrides:
        if redact(override) != override:
            raise UserError(
                f"{override.partition('=')[0]}: its secret would be seen in Ray's dashboard, in the job's command;"
                " want it in the environment of the cluster's nodes, such as AWS_SECRET_ACCESS_KEY or"
                " MLFLOW_TRACKING_PASSWORD"
            )


def check_read(config: ExperimentConfig, upload: Upload) -> None:
    """Raises UserError where a relative path that the job reads would not be on the cluster."""

    def check(key: str, corpus: tuple[str, ...]) -> None:
        entries = tuple(f"{upload.folder}/{entry}" for entry in corpus if _is_relative(entry))
        for file in list_files(entries, cache=upload.folder, key=key):
            upload.check_holds(file.name, f"{key}:")

    data = config.data
    for number, source in enumerate(() if data.is_stored else data.mixture):
        check(data.corpus_key(number), source.corpus)
    for split, corpus in [] if data.is_stored else data.held_out_corpora.items():
        check(f"data.{split}_corpus", corpus)
    if data.tokenizer and _is_relative(data.tokenizer):
        upload.check_holds(upload.folder / data.tokenizer, "data.tokenizer:")
    for task in config.evaluate.tasks:
        if is_task_file(task) and _is_relative(task):
            upload.check_holds(upload.folder / task, "evaluate.tasks:")
    folders = {"task_data": config.evaluate.task_data, "include": config.evaluate.include}
    places = {"model.init_from": config.model.init_from, **{f"evaluate.{key}": one for key, one in folders.items()}}
    for key, place in places.items():
        if place and _is_left_behind(place, upload):
            raise UserError(
                f"{key}: {place} is on this machine and not in the upload; want a path that every node has,"
                " or a folder that .gitignore and .rayignore do not leave out"
            )


def warn_about_paths(config: ExperimentConfig) -> None:
    """One line where results will lie on the cluster's head."""
    written = {"runs_folder": config.runs_folder, "data.folder": config.data.folder}
    if config.track.uri and config.track.uri.startswith("sqlite:///"):
        written["track.uri"] = config.track.uri.removeprefix("sqlite:///")
    if keys := [key for key, path in written.items() if _is_relative(path)]:
        log(
            f"warning  {', '.join(keys)}: relative, so they lie on the cluster's head, below ~/tokendrop or"
            " TOKENDROP_RESULTS; give paths that every node shares, such as runs_folder=/shared/runs"
        )


def _paths(config: ExperimentConfig) -> dict[str, Any]:
    """By their keys: what a job reads and writes."""
    data = config.data
    return {
        "runs_folder": config.runs_folder,
        "data.folder": data.folder,
        "data.tokenizer": data.tokenizer,
        "data.corpus": data.corpus,
        **{f"data.{split}_corpus": corpus for split, corpus in data.held_out_corpora.items()},
        "model.init_from": config.model.init_from,
        **{f"evaluate.{key}": getattr(config.evaluate, key) for key in ("tasks", "task_data", "include")},
        "data.sources": [asdict(one) for one in data.sources],
        "track.uri": config.track.uri,
    }


def _is_left_behind(place: str, upload: Upload) -> bool:
    """Whether a folder is here and not in the upload; one that is not here may be on the cluster, or on a hub."""
    is_here = _is_relative(place) and (upload.folder / place).exists()
    return is_here and not any(path.is_relative_to(place) for path in upload.sizes)


def _is_relative(path: str) -> bool:
    return path != "python" and "://" not in path and not path.startswith(("/", "~"))


def _relative(path: str | Path, folder: Path) -> Path | None:
    """`path` below `folder`, as both are written or with links resolved; None where it lies outside."""
    for resolve in (os.path.abspath, os.path.realpath):
        if Path(resolve(path)).is_relative_to(resolve(folder)):
            return Path(resolve(path)).relative_to(resolve(folder))
    return None
