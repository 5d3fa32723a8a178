"""Perplexity of a loss."""

from math import exp, inf


def perplexity(loss: float) -> float:
    """exp(loss), of a loss in nats per token; infinite where that is more than a float holds."""
    try:
        return exp(loss)
    except OverflowError:
        return inf
