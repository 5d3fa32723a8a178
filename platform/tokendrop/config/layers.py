"""Layers as a job names them: by number from 0, from the end when negative, or by range."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from tokendrop.schedule.kept_length import Schedule
from tokendrop.schedule.routes import Span

_KEY = re.compile(r"(?P<first>-?[0-9]{1,9})(-(?P<last>-?[0-9]{1,9}))?")


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the key that is wrong in front of the ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def dropped_layers(spans: Sequence[Span], layers: int) -> tuple[int, ...]:
    """Numbers, from 0, of the layers that see only the kept tokens.

    Raises:
        ValueError: the spans are not in a model of so many layers, or not apart and in order.
    """
    edges = [edge for first, last in spans for edge in (first, last + 1)]
    if edges != sorted(edges) or any(first > last for first, last in spans) or not min(edges, default=0) >= 0:
        raise ValueError(f"drop: want spans of layers apart and in order, got {list(spans)}")
    if max(edges, default=0) > layers:
        raise ValueError(f"drop: want spans of {layers} layers, got {list(spans)}")
    return tuple(layer for first, last in spans for layer in range(first, last + 1))


def keys_by_span(by_layer: Mapping[str, Schedule], spans: Sequence[Span], layers: int) -> dict[Span, str]:
    """For each span that `drop.by_layer` names, the key that does so.

    Raises:
        ValueError: a key names no layers of a model of so many, layers that see every token, layers of another key,
            or a part of the layers that share their kept tokens; the message names the key.
    """
    key_of: dict[int, str] = {}
    dropped = dropped_layers(spans, layers)
    for key in by_layer:
        with naming(f"drop.by_layer.{key}"):
            for layer in _layers(key, layers):
                if layer in key_of:
                    raise ValueError(f"layer {layer} is in '{key_of[layer]}' too; want each layer in one key")
                if layer not in dropped:
                    raise ValueError(f"layer {layer} sees every token; want some of the layers {_ranges(dropped)}")
                key_of[layer] = key
    for first, last in spans:
        keys = [key_of.get(layer) for layer in range(first, last + 1)]
        named = next((key for key in keys if key is not None), None)
        if named is not None and len(set(keys)) > 1:
            raise ValueError(
                f"drop.by_layer.{named}: layers {first} to {last} share their kept tokens; want one schedule for all"
            )
    return {span: key_of[span[0]] for span in spans if span[0] in key_of}


def _layers(key: str, layers: int) -> range:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError("want a layer or a range of layers, such as 5, -1 or 1-4")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if not all(-layers <= number < layers for number in (first, last)) or first % layers > last % layers:
        raise ValueError(f"want numbers of {layers} layers, 0 to {layers - 1} or -{layers} to -1, the first one first")
    return range(first % layers, last % layers + 1)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    gaps = [place for place, (one, two) in enumerate(pairwise(numbers), start=1) if two > one + 1]
    edges = [0, *gaps, len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(edges) if start < stop]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"
