"""`key=value` changes what its key names, in branches and in lists, and nothing else."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.config.load import load_job
from tokendrop.config.overrides import with_override
from tokendrop.errors import UserError

names = st.text("abc_", min_size=1, max_size=3)
trees = st.dictionaries(
    names,
    st.recursive(
        st.integers(0, 9),
        lambda below: st.lists(below, min_size=1, max_size=3) | st.dictionaries(names, below, min_size=1, max_size=3),
        max_leaves=12,
    ),
    min_size=1,
    max_size=3,
)


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every number in a tree with its key as users write it."""
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield from leaves(below, f"{key}.{name}" if key else name)
    elif isinstance(tree, list):
        for place, below in enumerate(tree):
            yield from leaves(below, f"{key}[{place}]")
    else:
        yield key, tree


@given(tree=trees, data=st.data())
def test_an_override_changes_the_leaf_that_it_names_and_no_other(tree: dict[str, Any], data: st.DataObject) -> None:
    before = copy.deepcopy(tree)
    key = data.draw(st.sampled_from([key for key, _ in leaves(tree)]))
    changed = with_override(tree, f"{key}=77")
    assert dict(leaves(changed)) == dict(leaves(before)) | {key: 77}
    assert tree == before


def test_branches_that_are_one_by_an_alias_are_two_once_one_is_overridden() -> None:
    shared = {"weight": 1}
    assert with_override({"a": [shared], "b": shared}, "a[0].weight=2") == {"a": [{"weight": 2}], "b": {"weight": 1}}


SOURCES = [
    {"name": "web", "corpus": ["web/*.jsonl", "more/*.jsonl"], "weight": 3},
    {"name": "books", "corpus": ["books"], "weight": 1},
]


def load(job: Path, *overrides: str) -> Any:
    """The job with two sources in the place of its corpus."""
    return load_job(job, ["data.corpus=[]", f"data.sources={json.dumps(SOURCES)}", *overrides])


def test_overrides_reach_one_source_of_a_mixture(job: Path) -> None:
    web, books = load(job, "data.sources[0].weight=2.5", "data.sources[1].corpus[0]=s3://b/books").data.sources
    assert (web.weight, web.corpus, web.name) == (2.5, ("web/*.jsonl", "more/*.jsonl"), "web")
    assert (books.weight, books.corpus) == (1, ("s3://b/books",))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.sources[2].weight=1", "'sources' holds a list of 2, counted from 0, it has no [2]"),
        ("data.sources[0].corpus[2]=x", "'corpus' holds a list of 2, counted from 0, it has no [2]"),
        ("data.sources[0].name.x=1", "'name' holds 'web', it has no keys below it"),
        ("data.sources.0.weight=1", "'sources' holds a list, it has no keys below it"),
        ("data[0]=1", "'data' holds a mapping, it has no [0]"),
        ("data.sources[-1].weight=1", "want an entry of a list as name[number], counted from 0"),
        ("data.sources[0.weight=1", "want an entry of a list as name[number], counted from 0"),
        ("[0]=1", "want an entry of a list as name[number], counted from 0"),
    ],
)
def test_an_entry_that_a_list_has_not_is_named(job: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        load(job, override)
    assert str(refused.value) == f"override {override!r}: {says}"


def test_an_entry_with_a_wrong_value_is_named_by_its_key(job: Path) -> None:
    with pytest.raises(UserError, match=r"job\.yaml: data\.sources\[1\]: want a weight above 0, got -1"):
        load(job, "data.sources[1].weight=-1")


@pytest.mark.parametrize("tag", ["kind", "method"])
def test_a_branch_of_another_kind_or_method_replaces_the_one_before(tag: str) -> None:
    before = {"a": {tag: "one", "b": 1}, "c": 2}
    assert with_override(before, f'a={{"{tag}": "two"}}') == {"a": {tag: "two"}, "c": 2}
    assert with_override(before, f'a={{"{tag}": "one", "d": 3}}') == {"a": {tag: "one", "b": 1, "d": 3}, "c": 2}
    assert with_override(before, 'a={"d": 3}') == {"a": {tag: "one", "b": 1, "d": 3}, "c": 2}
