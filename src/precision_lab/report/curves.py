"""What the runs of a comparison went through over their steps: one line an arm, and one for each diverged run.

The validation loss is of result.json. Training loss, loss scale and skipped steps are of the metrics.jsonl in the
runs' folders, which is read here and nowhere else; a file that is missing or damaged is left out, and named.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from precision_lab.folders import read_file
from precision_lab.report.compare import Comparison, Row
from precision_lab.report.read import Run

POINTS = 120  # of one line; more are thinned evenly, and the last stays
DIVERGED = 4  # lines of single diverged runs, more crowd the chart
READ = ("train/loss", "amp/loss_scale", "amp/skipped_steps")
Values = dict[int, float]  # by step


@dataclass(frozen=True)
class Point:
    """One step of a line: over its runs."""

    step: int
    mean: float
    low: float  # smallest
    high: float  # largest


@dataclass(frozen=True)
class Line:
    """One arm's runs, or one run that diverged."""

    label: str
    arm: str
    runs: int
    diverged: bool
    points: list[Point]


class Logs:
    """The metrics.jsonl files of a comparison's runs. `problems` are folder and reason of those that cannot be read."""

    def __init__(self, comparison: Comparison):
        self.problems: list[tuple[str, str]] = []
        self._of: dict[str, dict[str, Values]] = {}
        for row in comparison.rows:
            for run in told_of(row):
                self._of[run.folder] = self._read(run.folder, run.of_wandb)

    def values(self, name: str) -> Callable[[Run], Values]:
        """What gives the recorded values of that metric of a run."""
        return lambda run: self._of.get(run.folder, {}).get(name, {})

    def _read(self, folder: str, of_wandb: bool) -> dict[str, Values]:
        if of_wandb:
            self.problems.append((folder, "read from W&B, which tells the result alone, and no metrics.jsonl"))
            return {}
        found: dict[str, Values] = {name: {} for name in READ}
        try:
            for line in read_file(Path(folder) / "metrics.jsonl").decode().splitlines():
                _take(json.loads(line), found)
        except OSError as error:
            self.problems.append((folder, f"metrics.jsonl cannot be read ({error.strerror})"))
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            self.problems.append((folder, "metrics.jsonl is damaged"))
            return {}
        return found


def _take(line: dict, found: dict[str, Values]) -> None:
    step = int(line["train/step"])
    for name, values in found.items():
        if line.get(name) is not None:
            values[step] = float(line[name])
            if not math.isfinite(values[step]):  # written as null: this is damage
                raise ValueError(name)


def told_of(row: Row) -> list[Run]:
    """The runs of an arm that a line is drawn of: the completed ones that count, then those that diverged."""
    return row.counted + [run for run in row.runs if run.status == "diverged"]


def validation(run: Run) -> Values:
    """Validation loss in float32 of a run's evaluations."""
    known = zip(run.curve.get("step", []), run.curve.get("val_loss_fp32", []), strict=False)
    return {int(step): loss for step, loss in known if step is not None and loss is not None}


def lines(rows: Iterable[Row], values: Callable[[Run], Values]) -> list[Line]:
    """A line for every arm whose completed runs have values, and for its runs that diverged."""
    made, lost = [], []
    for row in rows:
        counted = [known for run in row.counted if (known := values(run))]
        if points := _points(counted):
            made.append(Line(row.arm, row.arm, len(counted), False, points))
        for run in told_of(row)[len(row.counted) :]:
            if points := _points([values(run)]):
                lost.append(Line(f"{row.arm}, seed {run.seed}, diverged", row.arm, 1, True, points))
    return made + lost[:DIVERGED]


def _points(runs: list[Values]) -> list[Point]:
    """At the steps that all runs have: a mean over fewer would jump where one is missing."""
    if not runs:
        return []
    steps = sorted(set.intersection(*(set(values) for values in runs)))
    made = []
    for step in _thinned(steps):
        known = [values[step] for values in runs]
        made.append(Point(step, sum(known) / len(known), min(known), max(known)))
    return made


def _thinned(steps: list[int]) -> Iterable[int]:
    if len(steps) <= POINTS:
        return steps
    return [steps[round(place * (len(steps) - 1) / (POINTS - 1))] for place in range(POINTS)]
