"""Names of the files of a run in a store, and what they tell."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokendrop.track.evaluations import SENT
from tokendrop.track.journal import LEDGER, METRICS, STEPS
from tokendrop.track.parts import span_of
from tokendrop.track.run_store import Told
from tokendrop.train.checkpoint_index import CHECKPOINTS, META

DRIVER, JOB = "driver.json", "job.yaml"
DATASETS = (STEPS, LEDGER)
_OF_MACHINE = ("control", "ray")  # folders that are of no use on another machine, or in another attempt
_OF_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d{{9,}})/.+")
_MARKER = re.compile(rf"({CHECKPOINTS}/step_(\d{{9,}})/\w+)/{re.escape(META)}")


def small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Files of a run folder beside its checkpoints and its record: bytes and time of change, by name."""
    found: dict[str, tuple[int, int]] = {}
    for top in folder.iterdir():
        if not is_small(top.name):
            continue
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and is_small(name := str(path.relative_to(folder))):
                state = path.stat()
                found[name] = (state.st_size, state.st_mtime_ns)
    return found


def is_small(name: str) -> bool:
    """Whether a file of this name, from the run folder on, is one of these; not one that is just being written."""
    first, *_ = parts = name.split("/")
    return first not in (CHECKPOINTS, *DATASETS, METRICS, DRIVER, *_OF_MACHINE) and not any(
        ".partial" in part or (part.startswith(".") and part != SENT) for part in parts
    )


def is_behind(part: str, step: int) -> bool:
    """Whether a part tells of steps behind this one."""
    span = span_of(Path(part))
    return span is None or span[1] > step


def committed_in(files: Iterable[str]) -> dict[int, str]:
    """Folders of committed checkpoints by their steps, rising, by the names of all files below `checkpoints`."""
    found = sorted((int(name[2]), name[1]) for file in files if (name := _MARKER.fullmatch(file)))
    return dict(found)


def steps_in(files: Iterable[str]) -> dict[str, int]:
    """Of these files those of checkpoints, committed or not, with their steps."""
    return {file: int(name[1]) for file in files if (name := _OF_STEP.fullmatch(file))}


def chained(parts: Mapping[str, Told]) -> list[str]:
    """Parts of the live record, each of which begins where the one before ends; one that was cut short counts not."""
    chain: list[str] = []
    for part in sorted(parts):
        begin, _, end = Path(part).stem.partition("-")
        is_named = begin.isdecimal() and end.isdecimal()
        if is_named and int(begin) == end_of(chain) and parts[part][0] == int(end) - int(begin):
            chain.append(part)
    return chain


def end_of(chain: list[str]) -> int:
    """Bytes of the live record that these parts hold."""
    return int(Path(chain[-1]).stem.partition("-")[2]) if chain else 0
