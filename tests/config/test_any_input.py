"""Whatever a job file holds, it is a job or it is refused; nothing else ever escapes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrop.cli.plan import plan_result
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job, load_job
from tokendrop.errors import UserError

KEYS = [
    "kind",
    "preset",
    "start",
    "kept",
    "every",
    "until",
    "increment",
    "stages",
    "at",
    "full",
    "layers",
    "base",
]
VALUES = ["gpt", "bert", "mslg", "linear", "constant", "piecewise", "full", "random_ltd", "none", "gpt-5m", "schedule"]
DURATIONS = [
    "1e999 steps",
    "70%",
    "101%",
    "-5 tokens",
    "1e18 tokens",
    "0 steps",
    "1e-99%",
    "9" * 5000 + " steps",
]

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 600)
    | st.integers(10**30, 10**400)
    | st.floats()
    | st.dates()
    | st.binary(max_size=4)
    | st.text(max_size=8)
    | st.sampled_from([*VALUES, *DURATIONS, "inf", "nan", "1e400", "\x00", "²"])
)
keys = st.sampled_from(KEYS) | st.text(max_size=5) | st.integers() | st.none() | st.booleans()
trees = st.recursive(
    leaves, lambda below: st.lists(below, max_size=4) | st.dictionaries(keys, below, max_size=4), max_leaves=8
)


def paths(tree: Any) -> Iterator[tuple[str, ...]]:
    """Of every branch and leaf in a tree of mappings."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield (key,)
            yield from ((key, *rest) for rest in paths(below))


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def loaded_or_refused(path: Path, *overrides: str) -> ExperimentConfig | None:
    try:
        return load_job(path, overrides)
    except UserError:
        return None


ELASTIC = ("scaling.mode=schedule", "scaling.profile=a100-40g-8", "scaling.max_workers=2")


@pytest.mark.parametrize("overrides", [(), ELASTIC], ids=["fixed", "elastic"])
@given(data=st.data())
@settings(max_examples=120)
def test_any_value_at_any_key_is_taken_or_refused(
    job: Path, tmp_path_factory, overrides: tuple[str, ...], data: st.DataObject
) -> None:
    tree = yaml.safe_load(dump_job(load_job(job, overrides)))
    put(tree, data.draw(st.sampled_from(list(paths(tree)))), data.draw(trees))
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")

    config = loaded_or_refused(path)

    if config is not None:
        path.write_text(dump_job(config), encoding="utf-8")
        assert load_job(path) == config
        assert plan_result(config.plan)["steps"] == config.steps


@given(data=st.data())
@settings(max_examples=100)
def test_any_override_is_taken_or_refused(job: Path, data: st.DataObject) -> None:
    tree = yaml.safe_load(dump_job(load_job(job)))
    key = ".".join(data.draw(st.sampled_from(list(paths(tree))))) + data.draw(st.just("") | st.text(".ab", max_size=3))
    value = data.draw(st.text(max_size=12) | trees.map(lambda tree: yaml.safe_dump(tree, default_flow_style=True)))
    loaded_or_refused(job, f"{key}={value}")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
@settings(max_examples=100)
def test_any_bytes_are_a_job_or_are_refused(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    assert loaded_or_refused(path) is None


mutations = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.integers(0, 9),
        st.binary(max_size=6)
        | st.sampled_from([b"\n", b"\0", b"<<: *a", b"&a ", b"*a", b"!!int ", b"\xed\xa0\x80", b"{", b"- "]),
    ),
    min_size=1,
    max_size=4,
)


@given(changes=mutations)
@settings(max_examples=150)
def test_a_job_file_with_any_bytes_changed_is_taken_or_refused(
    job: Path, tmp_path_factory, changes: list[tuple[int, int, bytes]]
) -> None:
    whole = load_job(job)
    content = dump_job(whole).encode()
    for at, length, put_in in changes:
        at %= len(content) + 1
        content = content[:at] + put_in + content[at + length :]
    path = tmp_path_factory.getbasetemp() / "changed.yaml"
    path.write_bytes(content)
    config = loaded_or_refused(path)
    if config is not None:  # another job, which says of itself what it is
        path.write_text(dump_job(config), encoding="utf-8")
        assert load_job(path) == config
    path.write_text(dump_job(whole), encoding="utf-8")
    assert load_job(path) == whole


@given(data=st.data())
@settings(max_examples=60)
def test_any_line_that_stands_twice_is_refused(job: Path, tmp_path_factory, data: st.DataObject) -> None:
    lines = dump_job(load_job(job)).splitlines()
    number = data.draw(st.sampled_from([n for n, line in enumerate(lines) if re.fullmatch(r" *\w+: \S.*", line)]))
    key = lines[number].partition(":")[0].strip()
    again = data.draw(
        st.sampled_from([lines[number], lines[number].replace(key, f"'{key}'"), lines[number] + " # again"])
    )
    path = tmp_path_factory.getbasetemp() / "twice.yaml"
    path.write_text("\n".join([*lines[:number], again, *lines[number:]]), encoding="utf-8")
    with pytest.raises(
        UserError, match=rf"the key '{key}' stands twice, in line {number + 1} and in line {number + 2}"
    ):
        load_job(path)


@given(st.lists(st.text(max_size=20) | st.tuples(st.sampled_from(KEYS), st.text(max_size=8)).map("=".join), max_size=3))
@settings(max_examples=100)
def test_any_overrides_are_taken_or_refused(job: Path, overrides: list[str]) -> None:
    loaded_or_refused(job, *overrides)


@pytest.mark.parametrize("text", ["&a [*a]", "name: &a {b: *a}", "base: &a {base: *a}", "<<: &a {<<: *a}"])
def test_a_tree_that_holds_itself_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError):
        load_job(tmp_path / "job.yaml")


def test_two_overrides_that_hold_themselves_are_refused(job: Path) -> None:
    with pytest.raises(UserError, match="holds itself"):
        load_job(job, ["drop=&a {b: *a}", "drop=&a {b: *a}"])
