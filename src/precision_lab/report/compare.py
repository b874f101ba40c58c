"""The arithmetic of a comparison: which runs may stand in one table, and what one arm is beside another.

Runs share a table if experiment signature, data and hardware fingerprint are equal. Figures are of completed
runs (skipped steps and loss scale of diverged ones, too); of two of one arm and seed the newest counts. Ratios and
differences are formed seed by seed against the reference arm, and carry the 95 % t interval of their mean over seeds
(Student 1908; of ratios, in logarithms).
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precision_lab.errors import InputError
from precision_lab.recorder import STATUSES, number_in
from precision_lab.report.benchmarks import Benchmark, Timing
from precision_lab.report.read import Found, Run, plain

# What is read from a run's summary.
FIGURES = {
    "step_ms": "final/perf_step_ms_p50",
    "samples_per_s": "final/perf_samples_per_s",
    "data_wait_share": "final/perf_data_wait_share",
    "measured_steps": "final/perf_measured_steps",
    "peak_allocated_gib": "final/mem_peak_allocated_gib",
    "saved_activations_mib": "final/mem_saved_activations_mib",
    "val_loss_fp32": "final/val_loss_fp32",
    "val_loss": "final/val_loss",
    "val_accuracy": "final/val_accuracy",
    "spike_score": "final/train_spike_score",
    "skipped_steps": "final/amp_skipped_steps",
    "loss_scale": "final/amp_loss_scale",
}
# Of the machine, which for an emulated arm is not the one that is meant.
OF_THE_MACHINE = (
    "step_ms", "samples_per_s", "data_wait_share", "measured_steps", "peak_allocated_gib", "saved_activations_mib",
)  # fmt: skip
# Of diverged runs as well: they tell why.
_OF_DIVERGED_TOO = ("skipped_steps", "loss_scale")


def _ratio(arm: float, reference: float) -> float | None:
    return math.log(arm) - math.log(reference) if arm > 0 and reference > 0 else None


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the end of an interval may lie beyond the largest float


# What is formed with the reference arm: from which figure, how for one seed, and what undoes the logarithm.
AGAINST: dict[str, tuple[str, Callable[[float, float], float | None], Callable[[float], float]]] = {
    "speed_ratio": ("step_ms", lambda arm, reference: _ratio(reference, arm), _exp),
    "peak_ratio": ("peak_allocated_gib", _ratio, _exp),
    "saved_ratio": ("saved_activations_mib", _ratio, _exp),
    "loss_difference": ("val_loss_fp32", lambda arm, reference: arm - reference, float),
}
# The order of rows: a column of FIGURES or AGAINST, with the better first.
SORTS = {
    "step_ms": 1, "samples_per_s": -1, "speed_ratio": -1, "peak_allocated_gib": 1, "saved_activations_mib": 1,
    "val_loss_fp32": 1, "loss_difference": 1,
}  # fmt: skip
_USUAL_ORDER = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Sample:
    """A figure over the completed runs of an arm."""

    n: int
    mean: float
    sd: float | None  # None for one run
    median: float
    low: float  # smallest
    high: float  # largest


@dataclass(frozen=True)
class Estimate:
    """A ratio or difference over pairs of runs of one seed, with the 95 % interval of its mean (None for one pair)."""

    pairs: int
    mean: float
    low: float | None
    high: float | None


@dataclass
class Row:
    """One arm."""

    arm: str
    runs: list[Run]  # newest last
    counted: list[Run]  # completed, one a seed
    is_reference: bool = False  # the others are compared with it
    figures: dict[str, Sample] = field(default_factory=dict)
    against: dict[str, Estimate] = field(default_factory=dict)  # nothing for the reference arm
    timing: Timing | None = None  # nothing for the reference arm, nor for one that no benchmark timed
    timed_by: Benchmark | None = None  # the benchmark that says so

    @property
    def settings(self) -> dict[str, Any]:
        """The arm's whole precision group."""
        return json.loads(self.runs[0].precision)

    @property
    def dtype(self) -> str:
        """What its matmuls compute in, by torch's name; "" where its settings do not tell."""
        return self.settings.get("autocast_dtype") or self.settings.get("param_dtype") or ""

    @property
    def emulates(self) -> str:
        """The device whose arithmetic was emulated, of which times and memory say nothing; "" for the machine's own."""
        return self.settings.get("emulate") or ""

    @property
    def perturbed(self) -> bool:
        """Whether its initial weights had noise put on them: a control, and no arm to train with."""
        return bool(self.settings.get("weight_noise"))

    @property
    def memory(self) -> dict[str, Any] | None:
        """The newest counted run's peak by kind, as its result.json has it; None where no run tells of the arm."""
        if self.emulates:
            return None
        told = [run for run in self.counted if run.memory and sum(run.memory["by_kind"].values()) > 0]
        return max(told, key=lambda run: run.finished).memory if told else None

    @property
    def statuses(self) -> Counter[str]:
        """How many runs ended how; a completed run that a newer one stands for is left out."""
        superseded = {id(run) for run in self.superseded}
        counts = Counter(run.status for run in self.runs if id(run) not in superseded)
        return Counter({status: counts[status] for status in STATUSES if counts[status]})

    @property
    def superseded(self) -> list[Run]:
        """Completed runs that do not count, since a newer one has their seed."""
        counted = {id(run) for run in self.counted}
        return [run for run in self.runs if run.status == "completed" and id(run) not in counted]


@dataclass(eq=False)
class Comparison:
    """One table: an experiment on one kind of hardware."""

    name: str
    experiment: str  # signature
    data: str | None  # hash; None where no run came as far as the data
    fingerprint: dict[str, Any]
    config: dict[str, Any]  # flat, the experiment's identity
    rows: list[Row]
    reference_name: str
    benchmarks: list[Benchmark]  # of this experiment, data and hardware, newest first
    akin: bool = False  # to the comparison before: the same experiment and data on other hardware
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # from the comparison before: there, here

    @property
    def runs(self) -> list[Run]:
        """Of all arms."""
        return [run for row in self.rows for run in row.runs]

    @property
    def newest(self) -> Run:
        """The run that finished last, of whatever arm."""
        return max(self.runs, key=lambda run: run.finished)

    @property
    def benchmark(self) -> Benchmark | None:
        """The newest whose ratios are used, or, where none is to be trusted, the newest."""
        used = [row.timed_by for row in self.rows if row.timed_by]
        return next((one for one in self.benchmarks if one in used), self.benchmarks[0] if self.benchmarks else None)

    @property
    def reference(self) -> Row | None:
        """The reference arm's row; None where it is absent, or has no completed run."""
        return next((row for row in self.rows if row.is_reference), None)

    @property
    def others(self) -> list[Row]:
        """The rows beside the reference arm's."""
        return [row for row in self.rows if not row.is_reference]


def compare(found: Found, reference: str = "fp32", sort: str | None = None) -> list[Comparison]:
    """The comparisons in `found`, neighbours alike.

    InputError where there is no run, or none of the reference arm named, or that is an emulated one, and for a column
    that is none.
    """
    if not found.runs:
        left_out = f" ({len(found.skipped)} left out, {': '.join(found.skipped[0])})" if found.skipped else ""
        raise InputError(f"There is no result in {', '.join(found.sources)}{left_out}; train something first.")
    if sort is not None and sort not in SORTS:
        raise InputError(f"--sort {sort} is no column; valid are {', '.join(SORTS)}.")
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(found.runs, key=lambda run: run.finished):
        groups.setdefault((run.experiment, run.hashes.get("data"), run.fingerprint), []).append(run)
    _place_those_without_data(groups)
    labels = _labels(found.runs)
    made = [
        _compare_one(runs, data, found.configs[signature], labels, found.benchmarks, reference, sort)
        for (signature, data, _), runs in groups.items()
    ]
    arms = sorted({row.arm for one in made for row in one.rows})
    if reference != "fp32" and reference not in arms:
        raise InputError(f"--reference {reference} is no arm of these runs; they have {', '.join(arms)}.")
    if any(row.is_reference and row.emulates for one in made for row in one.rows):
        raise InputError(
            f"--reference {reference} is emulated, so its runs have no times and no memory to compare others with; "
            "name an arm that is not."
        )
    made.sort(key=lambda one: (one.name, one.experiment, one.data or "", _order(one.fingerprint)))
    for before, here in zip(made, made[1:], strict=False):
        here.akin = (here.experiment, here.data) == (before.experiment, before.data)
        here.differs = _differences(before, here)
    return made


def _order(fingerprint: dict[str, Any]) -> tuple[str, str]:
    return str(fingerprint.get("model")), json.dumps(fingerprint, sort_keys=True)


def _place_those_without_data(groups: dict[tuple, list[Run]]) -> None:
    """A run that ended before its data was read stands with the experiment's others on its hardware."""
    for key in [key for key in groups if key[1] is None]:
        signature, _, fingerprint = key
        home = next((k for k in groups if k[0] == signature and k[2] == fingerprint and k[1] is not None), None)
        if home:
            groups[home] = sorted(groups[home] + groups.pop(key), key=lambda run: run.finished)


def _compare_one(
    runs: list[Run],
    data: str | None,
    config: dict[str, Any],
    labels: dict[tuple[str, str], str],
    benchmarks: list[Benchmark],
    reference: str,
    sort: str | None,
) -> Comparison:
    newest = runs[-1]
    here = (newest.experiment, data, dict(newest.fingerprint))
    timed = [one for one in benchmarks if (one.experiment, one.data, one.fingerprint) == here]
    timed.sort(key=lambda one: one.finished, reverse=True)
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.precision, []).append(run)
    rows = [_row(labels[newest.experiment, precision], of_arm) for precision, of_arm in arms.items()]
    base = next((row for row in rows if row.arm == reference and row.counted), None)
    if base:
        base.is_reference = True
        for row in rows:
            if row is not base:
                row.against = _against(row, base)
                _put_timing(row, base, timed)
    rows.sort(key=lambda row: _place(row, reference, sort))
    return Comparison(newest.name, newest.experiment, data, dict(newest.fingerprint), config, rows, reference, timed)


def _put_timing(row: Row, base: Row, benchmarks: list[Benchmark]) -> None:
    """A ratio timed in alternation takes the place of one from runs in turn; the newest benchmark counts."""
    known = ((one, timing) for one in benchmarks if (timing := one.timing_of(row.settings, base.settings)))
    row.timed_by, row.timing = next(known, (None, None))
    if row.timing:
        felt = row.timing.felt
        row.against["speed_ratio"] = Estimate(felt.pairs, felt.value, felt.low, felt.high)


def _labels(runs: list[Run]) -> dict[tuple[str, str], str]:
    """(experiment, precision group) -> label, one for each group of an experiment, on whatever hardware.

    Groups that were given one label, by a YAML changed between, get what differs beside it.
    """
    same: dict[tuple[str, str], list[str]] = {}  # (experiment, label) -> precision groups
    for experiment, arm, precision in dict.fromkeys((run.experiment, run.arm, run.precision) for run in runs):
        same.setdefault((experiment, arm), []).append(precision)
    labels: dict[tuple[str, str], str] = {}
    taken = {(experiment, arm) for (experiment, arm), precisions in same.items() if len(precisions) == 1}
    for (experiment, arm), precisions in same.items():
        groups = [json.loads(precision) for precision in precisions]
        all_keys = dict.fromkeys(key for group in groups for key in group)
        keys = [key for key in all_keys if len({json.dumps(group.get(key)) for group in groups}) > 1]
        for precision, group in zip(precisions, groups, strict=True):
            label = arm + (plain(f"[{','.join(f'{key}={group.get(key)}' for key in keys)}]") if keys else "")
            while keys and (experiment, label) in taken:
                label += "'"
            taken.add((experiment, label))
            labels[experiment, precision] = label
    return labels


def _row(arm: str, runs: list[Run]) -> Row:
    newest = {run.seed: run for run in runs if run.status == "completed"}  # runs are sorted: the last one stays
    row = Row(arm, runs, list(newest.values()))
    diverged = [run for run in runs if run.status == "diverged"]
    scaled = row.settings.get("grad_scaling")
    for name, key in FIGURES.items():
        if name == "loss_scale" and not scaled:
            continue  # a scaler that is off says 1
        if name in OF_THE_MACHINE and row.emulates:
            continue
        telling = row.counted + (diverged if name in _OF_DIVERGED_TOO else [])
        values = [value for run in telling if (value := number_in(run.summary, key)) is not None]
        if values:
            row.figures[name] = sample(values)
    return row


def sample(values: list[float]) -> Sample:
    """Figures of at least one value; all are NaN or infinite where the sum of the values is."""
    if not math.isfinite(total := sum(values)):
        return Sample(len(values), total, total, total, total, total)
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Sample(len(values), statistics.fmean(values), sd, statistics.median(values), min(values), max(values))


def _against(row: Row, base: Row) -> dict[str, Estimate]:
    partner = {run.seed: run for run in base.counted}
    pairs = [(run.summary, partner[run.seed].summary) for run in row.counted if run.seed in partner]
    made = {}
    for name, (figure, form, undo) in AGAINST.items():
        if figure in OF_THE_MACHINE and row.emulates:
            continue
        key = FIGURES[figure]
        known = [(a[key], b[key]) for a, b in pairs if a.get(key) is not None and b.get(key) is not None]
        values = [value for pair in known if (value := form(*pair)) is not None]
        if values:
            mean, low, high = interval(values)
            low, high = (None if bound is None else undo(bound) for bound in (low, high))
            made[name] = Estimate(len(values), undo(mean), low, high)
    return made


def interval(values: list[float], confidence: float = 0.95) -> tuple[float, float | None, float | None]:
    """The mean and its interval by Student's t; no interval for one value."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None, None
    from scipy.special import stdtrit  # costs half a second, and is needed only here

    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _place(row: Row, reference: str, sort: str | None) -> tuple:
    usual = _USUAL_ORDER.index(row.arm) if row.arm in _USUAL_ORDER else len(_USUAL_ORDER)
    by_arm = (row.arm != reference, usual, row.arm)
    if not sort:
        return by_arm
    itself = {"speed_ratio": 1.0, "loss_difference": 0.0} if row.is_reference else {}
    known = itself | {name: one.mean for name, one in {**row.figures, **row.against}.items()}
    if "step_ms" in row.figures:
        known["step_ms"] = row.figures["step_ms"].median  # as it is shown
    value = known.get(sort)
    return (value is None, SORTS[sort] * (value or 0.0), by_arm)


def _differences(before: Comparison, here: Comparison) -> dict[str, tuple[Any, Any]]:
    """What keeps two comparisons apart, by key."""
    pairs = [
        (before.config, here.config),
        ({"data": before.data}, {"data": here.data}),
        (before.fingerprint, here.fingerprint),
    ]
    found = {
        key: (there.get(key), now.get(key))
        for there, now in pairs
        for key in {**there, **now}
        if there.get(key) != now.get(key)
    }
    return found or {"experiment_signature": (before.experiment, here.experiment)}  # of two versions of the code
