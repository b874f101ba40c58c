"""The verdict on an arm's loss: equivalent, worse, better or undecided, and what stands beside it.

The validation loss is the one computed in float32 for every arm, paired by seed. An arm is equivalent if two
one-sided tests say so (Schuirmann 1987): the 90 % t interval of the mean difference lies within the margin, which
the experiment's config fixed before the runs. Else it is worse or better if the 95 % t interval leaves 0 out, which
without a true difference happens to 5 % of arms. Units: nats, seconds of training, steps.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy

from precision_lab.report.compare import FIGURES, Comparison, Estimate, Row, interval
from precision_lab.report.read import Run

# A verdict takes six pairs: with fewer no sign-flip test can come below 5 %.
PAIRS_FOR_A_VERDICT = 6
MORE_SEEDS = 100  # the largest number that is told
CONFIDENCE = 0.9  # of the interval that two one-sided tests at 5 % come down to, and that is shown
_OF_A_DIFFERENCE = 0.95  # confidence of the interval that leaves 0 out where an arm is worse or better
_EXACT = 16  # pairs up to which every pattern of signs is tried
_POINTS = 3  # of a curve, below which it tells no more than its end
_LOSS = FIGURES["val_loss_fp32"]


@dataclass(frozen=True)
class Loss:
    """An arm's validation loss minus the reference arm's, over pairs of runs of one seed."""

    word: str  # equivalent | worse | better | undecided
    pairs: int
    mean: float
    low: float | None  # of the 90 % interval; None for one pair
    high: float | None
    margin: float  # within which a difference counts as none
    sd: float | None  # of the differences
    correlation: float | None  # of the two arms' losses over seeds; None where one of them does not vary
    p: float | None  # of a two-sided sign-flip test; None below six pairs
    real: bool  # whether the 95 % interval leaves 0 out
    more_seeds: int | None  # about how many decide it; 0 where it is decided, None for more than MORE_SEEDS
    area: Estimate | None  # between the curves: mean over evaluations of ln(arm / reference), in %

    @property
    def few(self) -> bool:
        """Whether there are too few pairs for any verdict."""
        return self.pairs < PAIRS_FOR_A_VERDICT

    @property
    def negligible(self) -> bool:
        """Whether the difference is real, and lies within the margin all the same."""
        return self.word == "equivalent" and self.real


@dataclass(frozen=True)
class Reach:
    """When an arm's runs came to their targets. A median of None: fewer than half of the runs did."""

    targets: dict[int, float]  # seed -> the reference run's own final loss and the margin
    reached: int
    runs: int  # of seeds that have a run of both arms
    steps: float | None  # both of one run, the median one by train_s
    train_s: float | None  # None of an emulated arm, too


@cache
def losses_of(comparison: Comparison) -> dict[str, Loss]:
    """The verdict on each arm that has a loss, and a partner in the reference arm."""
    return _of_each(comparison, comparison.others, lambda row, base, share: _loss(_pairs(row, base), share))


@cache
def reaches_of(comparison: Comparison) -> dict[str, Reach]:
    """For each arm with curves, when its runs came to the reference run's final loss of the same seed."""

    def reach(row: Row, base: Row, share: float) -> Reach | None:
        known = _reach(_partners(row, base), share)
        return replace(known, train_s=None) if known and row.emulates else known

    return _of_each(comparison, comparison.rows, reach)


def _of_each(comparison: Comparison, rows: list[Row], form: Callable[[Row, Row, float], Any]) -> dict[str, Any]:
    """What is formed of each row, the reference arm's and the margin, by arm; where it is something."""
    base = comparison.reference
    if not base:
        return {}
    known = {row.arm: form(row, base, comparison.config["verdict.loss_margin"]) for row in rows}
    return {arm: one for arm, one in known.items() if one}


# --- the difference at the end -------------------------------------------------------------------------------------


def _pairs(row: Row, base: Row) -> list[tuple[Run, Run]]:
    partner = {run.seed: run for run in base.counted}
    both = [(run, partner[run.seed]) for run in row.counted if run.seed in partner]
    return [(a, b) for a, b in both if None not in (a.summary.get(_LOSS), b.summary.get(_LOSS))]


def _loss(pairs: list[tuple[Run, Run]], share: float) -> Loss | None:
    if not pairs:
        return None
    own, others = ([run.summary[_LOSS] for run in side] for side in zip(*pairs, strict=True))
    apart = [a - b for a, b in zip(own, others, strict=True)]
    mean, low, high = interval(apart, CONFIDENCE)
    margin = share * abs(statistics.fmean(others))
    word, more = verdict(apart, margin)
    return Loss(
        word,
        len(apart),
        mean,
        low,
        high,
        margin,
        sd=statistics.stdev(apart) if len(apart) > 1 else None,
        correlation=_correlation(own, others),
        p=sign_flip_p(apart) if len(apart) >= PAIRS_FOR_A_VERDICT else None,
        real=_differs(apart),
        more_seeds=more,
        area=_area(pairs),
    )


def verdict(apart: list[float], margin: float) -> tuple[str, int | None]:
    """(the word, about how many more seeds decide it): 0 where it is decided, None for more than MORE_SEEDS.

    `apart` are the differences, one a pair of seeds.
    """
    if len(apart) < PAIRS_FOR_A_VERDICT:
        return "undecided", PAIRS_FOR_A_VERDICT - len(apart)
    mean, low, high = interval(apart, CONFIDENCE)
    if not any(apart) or -margin < low <= high < margin:
        return "equivalent", 0
    if _differs(apart):
        return ("worse" if mean > 0 else "better"), 0
    return "undecided", _more_seeds(len(apart), abs(mean), statistics.stdev(apart), margin)


def _differs(apart: list[float]) -> bool:
    _, low, high = interval(apart, _OF_A_DIFFERENCE)
    return low is not None and (low > 0 or high < 0)


def _more_seeds(pairs: int, mean: float, sd: float, margin: float) -> int | None:
    """The least number with which, were mean and sd to stay, one interval fits into the margin or one leaves 0 out."""
    from scipy.special import stdtrit

    then = pairs + numpy.arange(1, MORE_SEEDS + 1)

    def half(confidence: float) -> numpy.ndarray:
        return stdtrit(then - 1, (1 + confidence) / 2) * sd / numpy.sqrt(then)

    enough = numpy.flatnonzero((half(CONFIDENCE) < margin - mean) | (half(_OF_A_DIFFERENCE) < mean))
    return int(enough[0]) + 1 if len(enough) else None


def sign_flip_p(apart: list[float]) -> float:
    """Two-sided p of the mean difference, were each pair's sign a coin's throw (Fisher 1935).

    Exact up to 16 pairs; above, over 2^16 patterns: the one seen, and the rest drawn.
    """
    values = numpy.asarray(apart)
    if len(values) <= _EXACT:
        signs = numpy.array(list(product((1, -1), repeat=len(values))))
    else:
        signs = numpy.random.default_rng(0).choice((1, -1), size=(2**_EXACT, len(values)))
        signs[0] = 1
    tolerance = 1e-12 * numpy.abs(values).sum()  # patterns that tie come out a rounding apart
    return float((numpy.abs(signs @ values) >= abs(values.sum()) - tolerance).mean())


def _correlation(own: list[float], others: list[float]) -> float | None:
    if min(len(set(own)), len(set(others))) < 2:
        return None
    return statistics.correlation(own, others)


# --- the whole curve -----------------------------------------------------------------------------------------------


def _area(pairs: list[tuple[Run, Run]]) -> Estimate | None:
    curves = [run.curve for pair in pairs for run in pair]
    steps = curves[0].get("step", [])
    losses = [value for curve in curves for value in curve.get("val_loss_fp32", [None])]
    if len(steps) < _POINTS or any(curve.get("step") != steps for curve in curves):
        return None
    if any(value is None or value <= 0 for value in losses):
        return None
    logs = [statistics.fmean(map(math.log, curve["val_loss_fp32"])) for curve in curves]
    mean, low, high = interval([100 * (a - b) for a, b in zip(logs[::2], logs[1::2], strict=True)])
    return Estimate(len(pairs), mean, low, high)


def _partners(row: Row, base: Row) -> list[tuple[Run, Run]]:
    """(run, the reference run of its seed): completed runs, and diverged ones where a seed has no completed one."""
    diverged = {run.seed: run for run in row.runs if run.status == "diverged"}
    own = diverged | {run.seed: run for run in row.counted}
    known = [run for run in base.counted if run.summary.get(_LOSS) is not None]
    return [(own[run.seed], run) for run in known if run.seed in own]


def _reach(pairs: list[tuple[Run, Run]], share: float) -> Reach | None:
    drawn = [base if run.status == "diverged" else run for run, base in pairs]
    if not pairs or any(len(run.curve.get("step", [])) < _POINTS for run in drawn):
        return None
    finals = {base.seed: base.summary[_LOSS] for _, base in pairs}
    targets = {seed: final + share * abs(final) for seed, final in finals.items()}
    points = sorted(_first(run, targets[run.seed]) for run, _ in pairs)
    reached = sum(train_s < math.inf for train_s, _ in points)
    train_s, steps = points[(len(points) - 1) // 2]  # the lower of two middle ones, which is a run as well
    found = (steps, train_s) if train_s < math.inf else (None, None)
    return Reach(targets, reached, len(points), *found)


def _first(run: Run, target: float) -> tuple[float, float]:
    """(seconds, steps) at its first evaluation within the target; infinite where there is none, or the run diverged."""
    columns = (run.curve.get(name, []) for name in ("train_s", "step", "val_loss_fp32"))
    points = zip(*columns, strict=True) if run.status == "completed" else ()
    within = ((train_s, step) for train_s, step, loss in points if None not in (train_s, loss) and loss <= target)
    return next(within, (math.inf, math.inf))
