"""What is checked before a job is submitted: that everything it needs is uploaded, and nothing that is too much."""

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pathspec import PathSpec

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import read_mapping
from tokendrop.errors import UserError, first_line
from tokendrop.launch.results import absolute_corpus
from tokendrop.render import say
from tokendrop.secrets import redact

DRIVER = Path("jobs/run.py")
LEFT_OUT = [".git", ".venv", "venv", "__pycache__"]
MIB = 2**20

_WARN_BYTES, _MOST_BYTES = 25 * MIB, 100 * MIB  # the most that Ray's dashboard takes in one request


@dataclass(frozen=True, slots=True)
class Upload:
    """What Ray takes of a working folder: relative paths and their bytes."""

    folder: Path
    sizes: dict[Path, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    def check_holds(self, path: str | Path, what: str) -> Path:
        """`path` relative to the folder; raises UserError where it would not be on the cluster."""
        inside = _relative(path, self.folder)
        if inside is None:
            raise UserError(f"{what} {path} lies outside of --working-dir {self.folder}, which is what is uploaded")
        if inside not in self.sizes:
            raise UserError(
                f"{what} {path} is left out of the upload by a .gitignore or .rayignore in {self.folder}"
                if (self.folder / inside).is_file()
                else f"--working-dir {self.folder}: no {inside} in it; want a checkout of tokendrop"
            )
        return inside


def list_upload(working_dir: str) -> Upload:
    """The files that Ray would upload: by the rules that it documents, .gitignore and .rayignore among them."""
    folder = Path(os.path.abspath(working_dir))
    if not folder.is_dir():
        raise UserError(f"--working-dir {working_dir}: no such folder")
    never = (folder, PathSpec.from_lines("gitignore", LEFT_OUT))
    return Upload(folder, {path.relative_to(folder): path.stat().st_size for path in _uploaded(folder, (never,))})


def _uploaded(path: Path, rules: tuple[tuple[Path, PathSpec], ...]) -> Iterator[Path]:
    """Files at or below `path` that no rule leaves out; a rule holds below the folder of its file.

    As git does, Ray matches every folder on the way, and looks at nothing in one that is left out. Unlike git, where
    a pattern brings a whole folder back (`!name`), Ray still leaves out the files in it; here git's rule holds.
    """
    rules += tuple(_ignore_rules(path))
    if any(patterns.match_file(path.relative_to(folder)) for folder, patterns in rules):
        return
    if path.is_dir():
        for inside in path.iterdir():
            yield from _uploaded(inside, rules)
    elif path.is_file():
        yield path


def _ignore_rules(folder: Path) -> Iterator[tuple[Path, PathSpec]]:
    names = (".gitignore", ".rayignore")
    for name in names[1:] if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1" else names:
        if (file := folder / name).is_file():
            try:
                yield folder, PathSpec.from_lines("gitignore", file.read_text().splitlines())
            except ValueError as error:
                raise UserError(f"{file}: want the patterns of a .gitignore ({first_line(error)})") from None


def check_job_files(job: str, upload: Upload) -> Path:
    """The job file relative to the working folder; the file, its base and the driver must be uploaded."""
    upload.check_holds(upload.folder / DRIVER, "the driver")
    inside = upload.check_holds(job, "the job file")
    base = read_mapping(Path(job), "job file", keys="'model:'").get("base")
    if base is not None:
        upload.check_holds(Path(job).parent / base, f"{job}: base:")
    return inside


def check_size(upload: Upload) -> None:
    """Raises UserError over what a dashboard takes; says so when it comes near."""
    size = upload.size_bytes
    if size < _WARN_BYTES:
        return
    heaviest = ", ".join(f"{path} ({size / MIB:.0f} MiB)" for path, size in heaviest_paths(upload.sizes))
    if size >= _MOST_BYTES:
        raise UserError(
            f"--working-dir {upload.folder}: {size / MIB:.0f} MiB to upload, and Ray takes less than"
            f" {_MOST_BYTES // MIB}; name what the job does not need in .gitignore or .rayignore: {heaviest}"
        )
    say(f"warning  {size / MIB:.0f} MiB to upload from {upload.folder}, most of it {heaviest}")


def heaviest_paths(sizes: dict[Path, int], count: int = 3) -> list[tuple[Path, int]]:
    """The files and folders that hold the most; one that makes up most of its parent stands for it."""
    totals: Counter[Path] = Counter()
    for path, size in sizes.items():
        for part in (path, *path.parents[:-1]):
            totals[part] += size
    heaviest_child: dict[Path, int] = {}
    for path, size in totals.items():
        heaviest_child[path.parent] = max(size, heaviest_child.get(path.parent, 0))
    named: list[tuple[Path, int]] = []
    for path, size in totals.most_common():
        overlaps = any(path.is_relative_to(other) or other.is_relative_to(path) for other, _ in named)
        if len(named) < count and not overlaps and heaviest_child.get(path, 0) <= size / 2:
            named.append((path, size))
    return named


def absolute_paths(config: ExperimentConfig, folder: Path) -> list[str]:
    """Overrides by which the job reads and writes in the working folder, not in Ray's copy of it."""
    overrides: list[str] = []

    def override(key: str, value: Any) -> None:
        overrides.append(f"{key}={json.dumps(value, ensure_ascii=False)}")

    for key, path in _relative_paths(config).items():
        if key == "track.uri":
            override(key, f"sqlite:///{folder / path}")
        else:
            override(key, str(folder / path))
    data = config.data
    if data.corpus != (corpus := absolute_corpus(data.corpus, folder)):
        override("data.corpus", corpus)
    sources = [{**asdict(one), "corpus": absolute_corpus(one.corpus, folder)} for one in data.sources]
    if sources != [asdict(one) for one in data.sources]:
        override("data.sources", sources)
    return overrides


def check_secrets(overrides: Sequence[str]) -> None:
    """Raises UserError where the job's command line would hold a secret: Ray shows it, and keeps it, for everybody."""
    for override in overrides:
        if redact(override) != override:
            raise UserError(
                f"{override.partition('=')[0]}: its secret would be seen in Ray's dashboard, in the job's command;"
                " want it in the environment of the cluster's nodes, such as AWS_SECRET_ACCESS_KEY or"
                " MLFLOW_TRACKING_PASSWORD"
            )


def check_corpus(config: ExperimentConfig, upload: Upload) -> None:
    """Raises UserError where a relative path of the corpus, or the tokenizer, would not be on the cluster."""
    data = config.data
    named = [
        (data.corpus_key(number), entry)
        for number, source in enumerate(data.mixture)
        for entry in source.corpus
        if entry != "python"
    ]
    named += [("data.tokenizer", data.tokenizer)] if data.tokenizer else []
    for key, entry in named:
        if not _is_relative(entry):
            continue
        found = [Path(path) for path in glob.glob(str(upload.folder / entry), recursive=True)]
        if not found:
            raise UserError(f"{key}: no such file, folder or glob in {upload.folder}: {entry}")
        for path in found:
            inside = _relative(path, upload.folder)
            if inside is None or not any(file.is_relative_to(inside) for file in upload.sizes):
                raise UserError(
                    f"{key}: {entry} would not be on the cluster: {path} is not part of the upload"
                    " (.gitignore, .rayignore or outside of --working-dir); want a path or URI that every"
                    " node reads"
                )


def warn_about_paths(config: ExperimentConfig) -> None:
    """One line where results will lie on the cluster's head."""
    keys = [key for key in _relative_paths(config) if key != "data.tokenizer"]
    if keys:
        say(
            f"warning  {', '.join(keys)}: relative, so they lie on the cluster's head, below ~/tokendrop or"
            " TOKENDROP_RESULTS; give paths that every node shares, such as runs_folder=/shared/runs"
        )


def _relative_paths(config: ExperimentConfig) -> dict[str, str]:
    """Keys of single paths, the tracking database among them, that depend on the folder the job runs in."""
    paths = {"runs_folder": config.runs_folder, "data.folder": config.data.folder}
    if config.data.tokenizer:
        paths["data.tokenizer"] = config.data.tokenizer
    if config.track.uri and config.track.uri.startswith("sqlite:///"):
        paths["track.uri"] = config.track.uri.removeprefix("sqlite:///")
    return {key: path for key, path in paths.items() if _is_relative(path)}


def _is_relative(path: str) -> bool:
    return "://" not in path and not path.startswith(("/", "~"))


def _relative(path: str | Path, folder: Path) -> Path | None:
    """`path` below `folder`, as both are written or with links resolved; None where it lies outside."""
    for resolve in (os.path.abspath, os.path.realpath):
        if Path(resolve(path)).is_relative_to(resolve(folder)):
            return Path(resolve(path)).relative_to(resolve(folder))
    return None
