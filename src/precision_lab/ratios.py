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
RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """exp of the median logarithm of paired ratios, with its interval: of 95 %, or as `ratio_of` was asked."""

    pairs: int
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """`1.482 [1.470, 1.495]`."""
        return f"{short(self.value)} [{short(self.low)}, {short(self.high)}]"

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

        The ends that lie beyond an end of the margin have to come inside, or all the way outside. Where the estimate
        lies on the margin's end no number would do; then it is told as if a quarter of the margin were to be cleared.
        """
        if self.word != "not resolved":
            return self.pairs
        least = MARGIN / 4
        below, above = self.value - self.low, self.high - self.value
        outside = {
            self.value > 1 + MARGIN: below / max(self.value - 1 - MARGIN, least),
            self.value < 1 - MARGIN: above / max(1 - MARGIN - self.value, least),
        }
        inside = max(below / max(self.value - 1 + MARGIN, least), above / max(1 + MARGIN - self.value, least))
        return math.ceil(round(self.pairs * max(outside.get(True, inside), 1.01) ** 2, 6))


def short(value: float) -> str:
    """A ratio by three digits after the point, for intervals of a per cent; one far from 1 by its magnitude."""
    return f"{value:.3f}" if 0.1 <= value < 100 else f"{value:.3g}"


def ratio_of(sittings: Sequence[Sequence[float]], confidence: float = 0.95) -> Ratio:
    """The ratio from the logarithms of paired ratios, sitting by sitting; each has at least one.

    The interval is a percentile bootstrap over pairs that draws whole sittings (the clustered bootstrap, Davison and
    Hinkley 1997, section 3.8). With S sittings such an interval is too narrow by about sqrt(S / (S - 1)) and by the
    normal quantile over Student's, so its ends are moved away from the estimate by both. Of one sitting the pairs are
    drawn, and the spread between sittings is not in the interval. ValueError for less than two pairs.
    """
    if sum(map(len, sittings)) < 2:
        raise ValueError("one pair has no interval")
    if len(sittings) == 1:
        sittings = [[pair] for pair in sittings[0]]
    logs = numpy.concatenate([numpy.asarray(sitting, dtype=float) for sitting in sittings])
    sitting_of = numpy.repeat(numpy.arange(len(sittings)), [len(sitting) for sitting in sittings])
    order = numpy.argsort(logs)
    logs, sitting_of = logs[order], sitting_of[order]
    draws = numpy.random.default_rng(0).multinomial(
        len(sittings), numpy.full(len(sittings), 1 / len(sittings)), size=RESAMPLES
    )  # [RESAMPLES, S]: how often each sitting is drawn
    # in parts: the weights of all pairs in all resamples would be many
    medians = numpy.concatenate([_weighted_medians(logs, part[:, sitting_of]) for part in numpy.array_split(draws, 40)])
    estimate, stretch = float(numpy.median(logs)), _stretch(len(sittings), confidence)
    ends = numpy.quantile(medians, ((1 - confidence) / 2, (1 + confidence) / 2))
    low, high = (estimate + (float(end) - estimate) * stretch for end in ends)
    return Ratio(len(logs), *(math.exp(value) for value in (estimate, low, high)))


def _weighted_medians(ordered: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
    """The median of `ordered` [N] under each row of whole weights [R, N]: midway where the two halves part."""
    below = numpy.cumsum(weights, axis=1)
    half = below[:, -1:] / 2
    return (ordered[(below >= half).argmax(axis=1)] + ordered[(below > half).argmax(axis=1)]) / 2


def _stretch(sittings: int, confidence: float) -> float:
    from scipy.special import ndtri, stdtrit  # costs half a second, and is needed only here

    tail = (1 + confidence) / 2
    return math.sqrt(sittings / (sittings - 1)) * float(stdtrit(sittings - 1, tail) / ndtri(tail))
