"""How well the trials of a sweep followed each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of trials that have ended, in seconds of the clock."""

    places: int
    """How many trained at once, at most."""
    busy_share: float
    """Of the time of all places from the first step of the first trial to the last of the last one."""
    startup_s: float | None
    """From the end of a trial to the first step of the next in its place, the median; None where no place had two."""


def usage_of(spans: Sequence[tuple[float, float]]) -> Usage | None:
    """What the begins and ends of trials say; None with fewer than two of them."""
    if len(spans) < 2:
        return None
    begins, ends = (sorted(times) for times in zip(*spans, strict=True))
    places = max(sum(begin <= moment < end for begin, end in spans) for moment in begins)
    took = (ends[-1] - begins[0]) * places
    # the trial that ends first leaves its place to the one that begins once all places were taken
    gaps = [begin - end for begin, end in zip(begins[places:], ends, strict=False)]
    return Usage(
        places=places,
        busy_share=sum(end - begin for begin, end in spans) / took if took > 0 else 1.0,
        startup_s=median(gaps) if gaps else None,
    )


def usage_text(usage: Usage) -> str:
    """The same for people."""
    text = f"{usage.places} at once, at work {usage.busy_share:.1%} of the time from the first step to the last"
    return text if usage.startup_s is None else f"{text}; a trial begins {usage.startup_s:.2f} s after the one before"
