"""What a run keeps of its losses: how often the training loss jumped, and the validation loss over the training.

No torch: the losses are on the host by then.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy

POINTS = 100  # of a curve, at most
_WINDOW, _FIRST, _SDS = 1000, 101, 7
_ROUNDING = 1e-6  # a rise by a smaller share of the mean is float32's rounding


class Spikes:
    """The spike score of OLMo 2 (arXiv 2501.00656), kept up as the losses come in.

    A loss counts as a spike if it lies at least 7 standard deviations above the mean of up to the 1000 before it.
    Losses that are not finite are left out: they are counted as such.
    """

    def __init__(self) -> None:
        self._before = numpy.empty(0)  # the last finite losses
        self._seen = self._judged = self._spikes = 0

    def add(self, losses: numpy.ndarray) -> None:
        """Judge the next steps' losses."""
        new = losses[numpy.isfinite(losses)]
        if not len(new):
            return
        known = numpy.concatenate([self._before, new])
        end = numpy.arange(len(self._before), len(known))  # of the losses before each new one
        start = numpy.maximum(0, end - _WINDOW)
        count = numpy.maximum(1, end - start)
        about = known - known[0]  # smaller numbers, whose squares lose less
        mean, square = (_sums(values, start, end) / count for values in (about, about**2))
        sd = numpy.sqrt(numpy.maximum(0.0, square - mean**2))
        rise = about[end] - mean
        spike = (rise >= _SDS * sd) & (rise > _ROUNDING * numpy.abs(known[0] + mean))
        judged = self._seen + 1 + numpy.arange(len(new)) >= _FIRST
        self._judged += int(judged.sum())
        self._spikes += int((spike & judged).sum())
        self._seen += len(new)
        self._before = known[-_WINDOW:]

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: what `load_state` takes."""
        return {
            "before": self._before.tolist(),
            "seen": self._seen,
            "judged": self._judged,
            "spikes": self._spikes,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = numpy.asarray(state["before"], dtype="float64")
        self._seen, self._judged, self._spikes = state["seen"], state["judged"], state["spikes"]

    @property
    def score(self) -> float | None:
        """Share of the losses from the 101st on that are spikes; None if there are none so far."""
        return self._spikes / self._judged if self._judged else None


def _sums(values: numpy.ndarray, start: numpy.ndarray, end: numpy.ndarray) -> numpy.ndarray:
    """Of each `values[start:end]`."""
    total = numpy.concatenate([[0.0], numpy.cumsum(values)])
    return total[end] - total[start]


class Curve:
    """The validation loss, computed in float32, at the evaluations of a run."""

    def __init__(self, points: Iterable[tuple[int, float, float | None]] = ()) -> None:
        self.points = list(points)

    def add(self, step: int, train_s: float, loss: float) -> None:
        """After `step` steps and `train_s` seconds of training alone."""
        self.points.append((step, round(train_s, 6), loss if math.isfinite(loss) else None))

    def stored(self) -> dict[str, list[float | None]]:
        """Column by column, at most POINTS of them, evenly chosen with the last; a loss that is not finite is None."""
        last = len(self.points) - 1
        kept = sorted({round(place) for place in numpy.linspace(0, last, min(len(self.points), POINTS))})
        columns = zip(*(self.points[place] for place in kept), strict=True) if self.points else ((), (), ())
        return dict(zip(("step", "train_s", "val_loss_fp32"), map(list, columns), strict=True))
