"""What our messages, comments in jobs and guides advise can be done: every key that they name is one of a job."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from tokendrop.config.experiment import ExperimentConfig

ROOT = Path(__file__).parents[2]
KEY = re.compile(
    r"(?<![\w/.`@<-])(?:model|data|train|drop|scaling|checkpoint|track|evaluate)(?:\.[a-z_]+(?:\[\w*\])?)+(?![\w/(-])"
)
FILES_LIKE_KEYS = {"data.txt"}


@cache
def keys(config: Any = ExperimentConfig, prefix: str = "") -> frozenset[str]:
    """Every dotted key of a job, branches among them; entries of lists without their numbers."""
    found: set[str] = set()
    for one in (config, *get_args(config)):
        if get_origin(one) in (tuple, list):
            found |= keys(get_args(one)[0], prefix)
        elif dataclasses.is_dataclass(one):
            for field in dataclasses.fields(one):
                key = f"{prefix}{field.name.rstrip('_')}"
                found |= {key} | keys(get_type_hints(one)[field.name], f"{key}.")
    return frozenset(found)


def advised(text: str) -> Iterator[str]:
    for match in KEY.finditer(text):
        key = re.sub(r"\[\w*\]", "", match[0]).rstrip("_")
        if key not in FILES_LIKE_KEYS:
            yield key


def texts_of(path: Path) -> Iterator[str]:
    """The text of a guide or a job; of a program its messages and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


FILES = [
    *sorted((ROOT / "platform").rglob("*.py")),
    *sorted((ROOT / "platform").rglob("*.md")),
    *sorted((ROOT / "jobs").rglob("*.*")),
    *sorted((ROOT / "cluster").rglob("*.*")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_that_is_named_exists(path: Path) -> None:
    unknown = {key for text in texts_of(path) for key in advised(text)} - keys()
    assert unknown == set()


def test_keys_are_found_where_they_are_named() -> None:
    assert {"train.length", "scaling.mode", "data.sources", "drop.schedule.start", "data.sources.weight"} <= keys()
    assert [*advised("want key=value, such as train.steps=100")] == ["train.steps"]
    assert [*advised("data.sources[0].corpus: no such file; set scaling.mode: schedule.")] == [
        "data.sources.corpus",
        "scaling.mode",
    ]
    found = {key for path in FILES for text in texts_of(path) for key in advised(text)}
    assert len(found) > 30
