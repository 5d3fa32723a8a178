"""Learning rate against a clock: optimizer steps, or consumed layer tokens (LayerToken LR)."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

Decay = Literal["linear", "cosine", "constant", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay to `final`; the clock's unit is the caller's.

    LayerToken LR is this function on the layer-token clock, with the lengths of appendix C: the warm-up lasts
    as many layer tokens as it would at full length, and the decay takes all that the run consumes after it.
    With nothing dropped both clocks give the same rates.

    Source: Yao et al. 2022, arXiv:2211.11586, section 3.3 and appendix C; wsd: Hu et al. 2024, arXiv:2404.06395.
    """

    peak: float
    final: float
    warmup: int
    """Length of the warm-up, in the clock's unit."""
    decay_length: int
    """Length of the decay after it, in the clock's unit."""
    decay: Decay
    stable: int = 0
    """Of wsd (warm-up, stable, decay): how much of `decay_length` is at the peak before a linear decay."""

    def __post_init__(self) -> None:
        if not 0 <= self.final <= self.peak:
            raise ValueError(f"want 0 <= final <= peak learning rate, got final={self.final}, peak={self.peak}")
        if self.warmup < 0 or self.decay_length < 0:
            raise ValueError(f"the warm-up of {self.warmup} is longer than the run by {-self.decay_length}")
        if self.decay == "wsd" and self.stable == self.decay_length > 0:
            raise ValueError("decay 'wsd' wants a cooldown above 0; without one it is 'constant'")
        if not 0 <= self.stable <= self.decay_length:
            raise ValueError(f"the warm-up of {self.warmup} and the cooldown are longer than the run by {-self.stable}")

    def of_step(self, before: int, after: int) -> float:
        """The rate of a step, the clock showing `before` and `after` it.

        It is that of the clock after the step, so that the first step of a warm-up trains and the last step of a run
        has the final rate. A decay to 0 is read before the step: else the last step would train nothing.
        """
        if self.final == 0 and after > self.warmup:
            return self.at(max(before, self.warmup))
        return self.at(after)

    def at(self, clock: int) -> float:
        """The rate when the clock shows `clock`, counted from the start of the run."""
        if clock < self.warmup:
            return self.peak * (clock / self.warmup)
        if self.decay == "constant" or self.decay_length == 0:
            return self.peak
        if clock <= self.warmup + self.stable:
            return self.peak
        done = min(1.0, (clock - self.warmup - self.stable) / (self.decay_length - self.stable))
        left = 0.5 * (1.0 + cos(pi * done)) if self.decay == "cosine" else 1.0 - done
        return self.final + (self.peak - self.final) * left
