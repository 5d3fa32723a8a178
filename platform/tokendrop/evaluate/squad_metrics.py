"""Exact match and F1 of answers, as SQuAD's official script counts them (Rajpurkar et al. 2016, arXiv:1606.05250).

lm-eval's ReCoRD takes them from `transformers.data.metrics.squad_metrics`, which transformers 5 does not have any more.
"""

import re
import string
import sys
from collections import Counter
from importlib import import_module
from types import ModuleType

_MISSING = "transformers.data.metrics"


def compute_exact(gold: str, found: str) -> int:
    """1 where two answers are the same words, else 0."""
    return int(_words(gold) == _words(found))


def compute_f1(gold: str, found: str) -> float:
    """Of the words of an answer, with how often each comes; of an empty one, whether both are."""
    wanted, given = _words(gold), _words(found)
    common = (Counter(wanted) & Counter(given)).total()
    if not wanted or not given:
        return float(wanted == given)
    return 2 * common / (len(wanted) + len(given))


def _words(answer: str) -> list[str]:
    """In lower case, without punctuation and articles."""
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def stand_in() -> None:
    """Let lm-eval find these functions where transformers has none."""
    try:
        import_module(f"{_MISSING}.squad_metrics")
    except ModuleNotFoundError:
        sys.modules[_MISSING] = ModuleType(_MISSING)
        sys.modules[f"{_MISSING}.squad_metrics"] = sys.modules[__name__]
