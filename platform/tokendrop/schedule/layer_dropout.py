"""How many sequences of each global batch a layer runs on, where whole sequences pass layers by."""

from bisect import bisect_left
from dataclasses import dataclass
from math import expm1

_MOST_STEPS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedSequences:
    """All sequences at first, and fewer and fewer, but one; `KeptByStep`, counted in sequences of the global batch.

    The share that passes the layer by is `share * (1 - exp(-step / time_constant))`.
    Source: Zhang & He 2020, arXiv:2010.13369, section 4.2, with gamma = 1 / time_constant.
    """

    sequences: int
    """Of the global batch."""
    share: float
    """Of them, those that pass the layer by in the end; 0..1."""
    time_constant: float | None = None
    """Steps; None for the whole share from step 0 on."""

    def at(self, step: int) -> int:
        grown = 1.0 if self.time_constant is None else -expm1(-step / self.time_constant)
        return self.sequences - self._dropped(grown)

    def next_change(self, step: int) -> int | None:
        now = self.at(step)
        if now == self.sequences - self._dropped(1.0):
            return None
        ahead = 1
        while self.at(step + ahead) == now:
            ahead *= 2
            if ahead > _MOST_STEPS:
                return None
        later = range(step + ahead // 2, step + ahead + 1)  # the first of them still as now, the last one not
        return later[bisect_left(later, True, key=lambda other: self.at(other) != now)]

    def _dropped(self, grown: float) -> int:
        return min(self.sequences - 1, int(self.sequences * (self.share * grown) + 0.5))
