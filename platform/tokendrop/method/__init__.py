"""Random and layerwise token dropping for any transformer: torch alone, usable without the rest.

dropping = attach(model, seed=1234)             # every layer but the first and the last
dropping.draw(kept_length=128, step=step, sample_ids=ids, sequence_length=2048)
loss = model(...)                               # dropped layers see their own 128 tokens
detach(model)
"""

from tokendrop.method.attach import ROUTER, attach, detach, dropping_of
from tokendrop.method.draw import DrawContext
from tokendrop.method.dropped_layer import DroppedLayer
from tokendrop.method.dropper import Dropping
from tokendrop.method.learned_router import LearnedRouter
from tokendrop.method.route import HighestScore, Route, RunsLayer, Selector, Uniform, routes_along
from tokendrop.method.scores import TokenScores
from tokendrop.method.tokens import Stream, combine_tokens, gather_tokens
from tokendrop.method.whole_sequences import WholeSequences

__all__ = [
    "ROUTER",
    "DrawContext",
    "DroppedLayer",
    "Dropping",
    "HighestScore",
    "LearnedRouter",
    "Route",
    "RunsLayer",
    "Selector",
    "Stream",
    "TokenScores",
    "Uniform",
    "WholeSequences",
    "attach",
    "combine_tokens",
    "detach",
    "dropping_of",
    "gather_tokens",
    "routes_along",
]
