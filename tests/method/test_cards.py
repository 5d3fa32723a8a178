"""Each method has a card: where it comes from, what it claims, what it needs, where it does not apply."""

import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from tokendrop.config.drop import DropConfig, NoDropping

CARDS = Path(__file__).parents[2] / "platform" / "tokendrop" / "method" / "cards"
METHODS = [
    method
    for one in get_args(DropConfig)
    if one is not NoDropping and not inspect.isabstract(one)
    for method in get_args(get_type_hints(one)["method"])
]


def test_there_are_methods_to_look_at() -> None:
    assert {"random_ltd", "layer_dropout"} <= {*METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_a_card_with_an_example_of_it(method: str) -> None:
    card = (CARDS / f"{method}.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {method}\n")
    told = {name.lower() for name in re.findall(r"\*\*(.+?)\*\*", card)}
    assert {"source", "claim", "needs", "does not apply"} <= told
    (example,) = re.findall(r"^```yaml\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(example)["drop"]["method"] == method


def test_no_card_is_of_a_method_that_is_gone() -> None:
    assert {path.stem for path in CARDS.glob("*.md")} == {*METHODS, "by_layer", "adaptive"}
