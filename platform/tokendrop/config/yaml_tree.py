"""YAML as a tree of plain values: no key twice, and no tree that outgrows its own text."""

from typing import Any

import yaml

_MOST_VALUES = 100_000  # of a tree with its aliases written out; a job has some hundred


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        """As PyYAML's own, which lets the last of several equal keys win and says nothing; here ValueError."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise ValueError(f"the key {key.value!r} stands twice, in line {lines[name]} and in line {line}")
                lines[name] = line
        return node


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: a key stands twice in a mapping, or the tree holds itself or too many values.
        Exception: whatever else PyYAML raises.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > _MOST_VALUES:
            raise ValueError(f"with its aliases written out it holds more than {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        loader.dispose()


def _values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """How many values a node stands for, those behind each alias counted each time."""
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise ValueError("a branch of it holds itself")
        return count
    known[id(node)] = None
    below: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        below = node.value
    elif isinstance(node, yaml.MappingNode):
        below = [one for pair in node.value for one in pair]
    count = 1 + sum(_values(one, known) for one in below)
    known[id(node)] = count
    return count
