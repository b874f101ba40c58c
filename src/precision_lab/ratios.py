"""Ratios of times taken in pairs: the estimate, its interval, and the word that it carries. No torch.

A pair is one block of an arm's steps and one of the reference arm's, run next to each other. Pairs come in
sittings: at the start of each one all arms are built anew, since where a model lies in memory moves its step time
by several per cent, for as long as it lies there. A ratio above 1 means that the arm is faster than the reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

MARGIN = 0.025  # a ratio within 1 +- this makes no practical difference
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """exp of the median logarithm of paired ratios, with its 95 % interval."""

    pairs: int
    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a share of the ratio."""
        return math.sqrt(self.high / self.low) - 1

    @property
    def word(self) -> str:
        """faster | slower | no practical difference | not resolved."""
        if self.low > 1 + MARGIN:
            return "faster"
        if self.high < 1 - MARGIN:
            return "slower"
        if self.low >= 1 - MARGIN and self.high <= 1 + MARGIN:
            return "no practical difference"
        return "not resolved"

    @property
    def pairs_needed(self) -> int:
        """About how many pairs would resolve it: the interval shrinks like one over their square root.

        It has to clear the nearer end of the margin, and where the estimate lies on that end no number would do;
        then it is told as if a quarter of the margin were to be cleared.
        """
        end = 1 + MARGIN if self.value >= 1 else 1 - MARGIN
        room = max(abs(self.value - end), MARGIN / 4)
        return math.ceil(self.pairs * max(1.0, (self.half_width / room) ** 2))


def ratio_of(sittings: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """The ratio from the logarithms of paired ratios, sitting by sitting; each has at least one.

    The interval is a percentile bootstrap that draws sittings, then pairs within them (Efron 1979; Davison and
    Hinkley 1997, section 3.8). Few sittings make such an interval too narrow, so its distance from the estimate is
    stretched by sqrt(S / (S - 1)) for S sittings.
    """
    logs = [numpy.asarray(sitting, dtype=float) for sitting in sittings]
    estimate = float(numpy.median(numpy.concatenate(logs)))
    draw = numpy.random.default_rng(seed)
    medians = [numpy.median(numpy.concatenate(_resampled(logs, draw))) for _ in range(RESAMPLES)]
    stretch = math.sqrt(len(logs) / (len(logs) - 1)) if len(logs) > 1 else 1.0
    low, high = (estimate + (float(end) - estimate) * stretch for end in numpy.quantile(medians, (0.025, 0.975)))
    return Ratio(sum(map(len, logs)), *(math.exp(value) for value in (estimate, low, high)))


def _resampled(logs: list[numpy.ndarray], draw: numpy.random.Generator) -> list[numpy.ndarray]:
    chosen = draw.integers(len(logs), size=len(logs))
    return [logs[i][draw.integers(len(logs[i]), size=len(logs[i]))] for i in chosen]
