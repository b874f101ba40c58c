"""The charts of a comparison: what each shows, in a caption, a drawing and the table of its numbers.

A chart that there is nothing to show in is left out. Units: GiB = 2^30 and MiB = 2^20 bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from precision_lab.ratios import MARGIN, short
from precision_lab.report import curves, drawing
from precision_lab.report.compare import Comparison, Row
from precision_lab.report.curves import Line, Logs, Point, Values
from precision_lab.report.drawing import Key, Speed
from precision_lab.report.read import Run
from precision_lab.report.reading import difference, ratio
from precision_lab.report.render import Cells, by_reason, number
from precision_lab.report.timed import how_timed
from precision_lab.sizes import GIB, MIB

LOG_FROM = 20  # largest over smallest value from which a loss is drawn on a logarithmic axis
ALTERNATION = ("timed in alternation", "timed in turn, a hint only")
STEPS = "step-after"  # how a line goes on between the steps that are known


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    name: str  # of its picture
    heading: str
    caption: str
    spec: dict[str, Any]
    cells: Cells  # the numbers drawn
    keys: tuple[Key, ...] = ()  # a legend of its own, where the arms' is not the one
    arms: tuple[Key, ...] = ()  # of the arms' legend what is drawn, for a picture without the page's


def looks_of(comparisons: list[Comparison]) -> dict[str, Key]:
    """How each arm is drawn, alike in all of them."""
    arms = dict.fromkeys(row.arm for one in comparisons for row in one.rows)
    return {arm: drawing.arm_key(place, arm) for place, arm in enumerate(arms)}


def charts_of(comparison: Comparison, looks: dict[str, Key]) -> tuple[list[Chart], list[str]]:
    """(the charts that there is something for, what could not be read for them); `looks` are the arms'."""
    logs = Logs(comparison)
    wanted = [
        _validation(comparison, looks),
        _difference(comparison, looks),
        _training(comparison, logs, looks),
        _speed(comparison, looks),
        _memory(comparison),
        _scale(comparison, logs, looks),
        _skipped(comparison, logs, looks),
    ]
    return [chart for chart in wanted if chart], by_reason(logs.problems)


# --- over the steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """The vertical one: its title, Vega-Lite's scale, how a line goes on between its points, how a value is written."""

    title: str
    scale: dict[str, Any]
    bend: str = "linear"
    form: Callable[[float], str] = number


def _validation(comparison: Comparison, looks: dict[str, Key]) -> Chart | None:
    lines = curves.lines(comparison.rows, curves.validation)
    said = "Validation loss by training step, computed in float32 for every arm"
    return _over_steps(
        ("validation_loss", "Validation loss"), said, lines, _Axis("validation loss", _loss_scale(lines)), looks
    )


def _difference(comparison: Comparison, looks: dict[str, Key]) -> Chart | None:
    """Curves that lie upon each other still differ."""
    base = comparison.reference
    partner = {run.seed: curves.validation(run) for run in base.counted} if base else {}

    def apart(run: Run) -> Values:
        there = partner.get(run.seed, {}) if run.status == "completed" else {}
        return {step: loss - there[step] for step, loss in curves.validation(run).items() if step in there}

    lines = curves.lines(comparison.others, apart)
    said = f"Validation loss minus that of {comparison.reference_name} with the same seed, both computed in float32"
    axis = _Axis("difference", {"zero": True}, form=difference)
    names = ("validation_loss_difference", f"Validation loss minus {comparison.reference_name}'s")
    return _over_steps(names, said, lines, axis, looks)


def _training(comparison: Comparison, logs: Logs, looks: dict[str, Key]) -> Chart | None:
    lines = curves.lines(comparison.rows, logs.values("train/loss"))
    said = "Training loss by training step, in each arm's own precision"
    return _over_steps(
        ("training_loss", "Training loss"), said, lines, _Axis("training loss", _loss_scale(lines)), looks
    )


def _scale(comparison: Comparison, logs: Logs, looks: dict[str, Key]) -> Chart | None:
    lines = curves.lines(_scaled(comparison), logs.values("amp/loss_scale"))
    scale = {"type": "log", "base": 2, "nice": False} if _smallest(lines) > 0 else {}
    names, said = ("loss_scale", "Loss scale"), "Loss scale by training step"
    return _over_steps(names, said, lines, _Axis("loss scale", scale, STEPS), looks)


def _skipped(comparison: Comparison, logs: Logs, looks: dict[str, Key]) -> Chart | None:
    lines = curves.lines(_scaled(comparison), logs.values("amp/skipped_steps"))
    if not any(point.high for line in lines for point in line.points):
        return None
    said = "Steps whose update was skipped for a non-finite gradient, counted up by training step"
    axis = _Axis("skipped steps so far", {"zero": True}, STEPS)
    return _over_steps(("skipped_steps", "Skipped steps"), said, lines, axis, looks)


def _scaled(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.settings.get("grad_scaling")]


def _smallest(lines: list[Line]) -> float:
    return min((point.low for line in lines for point in line.points), default=0.0)


def _loss_scale(lines: list[Line]) -> dict[str, Any]:
    low, high = _smallest(lines), max((point.high for line in lines for point in line.points), default=0.0)
    return {"type": "log", "nice": True} if 0 < LOG_FROM * low < high else {"zero": False}


def _over_steps(
    names: tuple[str, str], said: str, lines: list[Line], axis: _Axis, looks: dict[str, Key]
) -> Chart | None:
    """`names` are the picture's and the heading."""
    if not lines:
        return None
    shown = "the mean over the runs of an arm, and a band from the smallest to the largest"
    lost = "; a thin line that ends in a cross is one run that diverged" if any(one.diverged for one in lines) else ""
    caption = f"{said}: {shown}{lost}. {' '.join(_last(lines, axis.form))}"
    title = f"{axis.title} (log scale)" if axis.scale.get("type") == "log" else axis.title
    texts = [{point.step: _range(point, axis.form) for point in line.points} for line in lines]
    steps = sorted({step for text in texts for step in text})
    told = {step: [text.get(step, "-") for text in texts] for step in steps}
    cells = (["step", *(line.label for line in lines)], [[str(step), *words] for step, words in told.items()])
    spec = drawing.line_spec(lines, looks, told, (title, axis.scale, axis.bend), caption)
    arms = tuple(looks[arm] for arm in dict.fromkeys(line.arm for line in lines))
    return Chart(*names, caption, spec, cells, arms=arms)


def _last(lines: list[Line], form: Callable[[float], str]) -> Iterator[str]:
    """`At step 400: fp32 0.52 and bf16 0.53 (3 runs each).`"""
    ends: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        last = line.points[-1]
        ends.setdefault((last.step, line.runs), []).append(f"{line.label} {form(last.mean)}")
    for (step, runs), told in ends.items():
        yield f"At step {step}: {', '.join(told)} ({f'{runs} runs each' if runs > 1 else '1 run'})."


def _range(point: Point, form: Callable[[float], str]) -> str:
    if point.low == point.high:
        return form(point.mean)
    return f"{form(point.mean)} ({form(point.low)} to {form(point.high)})"


# --- speed -----------------------------------------------------------------------------------------------------


def _speeds(comparison: Comparison) -> Iterator[Speed]:
    for row in comparison.rows:
        if row.timing:
            timed = row.timing
            kinds = {"computing alone": timed.ratio, "end to end": timed.end_to_end, "compiled": timed.compiled}
            for kind, one in kinds.items():
                if one:
                    label = f"{row.arm}, {kind}"
                    yield Speed(row.arm, label, ALTERNATION[0], one.word, one.value, one.low, one.high, one.pairs)
        elif "speed_ratio" in row.against:
            one = row.against["speed_ratio"]
            yield Speed(row.arm, row.arm, ALTERNATION[1], "-", one.mean, one.low, one.high, one.pairs)


def _speed(comparison: Comparison, looks: dict[str, Key]) -> Chart | None:
    speeds = list(_speeds(comparison))
    if not speeds:
        return None
    base = comparison.reference_name
    told = {how: [f"{one.label} {_interval_text(one)}" for one in speeds if one.how == how] for how in ALTERNATION}
    caption = (
        f"Speed ratio to {base}: above 1 is faster. A point with its 95 % interval, which may lead beyond the chart, "
        f"the line at 1, and the band within {100 * MARGIN:g} % of it that makes no practical difference. "
    ) + " ".join(f"{how.capitalize()}: {'; '.join(ones)}." for how, ones in told.items() if ones)
    caption = f"{caption} {how_timed(comparison)}".rstrip()
    header = ["arm", "how", "verdict", "speed ratio", "from", "to", "pairs"]
    rows = [
        [one.label, one.how, one.word, *(_bound(one, end) for end in (one.value, one.low, one.high)), str(one.pairs)]
        for one in speeds
    ]
    spec = drawing.speed_spec(speeds, looks, list(map(_interval_text, speeds)), caption)
    return Chart("speed_ratio", f"Speed ratio to {base}", caption, spec, (header, rows))


def _interval_text(one: Speed) -> str:
    value, low, high = (_bound(one, end) for end in (one.value, one.low, one.high))
    return value if one.low is None else f"{value} [{low}, {high}]"


def _bound(one: Speed, end: float | None) -> str:
    if end is None:
        return "-"
    return short(end) if one.how == ALTERNATION[0] else ratio(end)


# --- memory ----------------------------------------------------------------------------------------------------


def _memory(comparison: Comparison) -> Chart | None:
    known = [(row, row.memory) for row in comparison.rows if row.memory]
    if not known:
        return None
    largest = max(sum(memory["by_kind"].values()) for _, memory in known)
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    everyone = dict.fromkeys(kind for _, memory in known for kind in memory["by_kind"])
    kinds = [kind for kind in everyone if any(memory["by_kind"].get(kind) for _, memory in known)]
    told = "; ".join(
        f"{row.arm} {number(sum(memory['by_kind'].values()) / size)} {unit}, in the {_phase(memory)}"
        for row, memory in known
    )
    caption = f"What the memory at each arm's peak was used for, in {unit}. The peak and the phase it sits in: {told}."
    words = [kind.replace("_", " ") for kind in kinds]
    cells = (
        ["arm", "phase of the peak", f"peak {unit}", *words],
        [
            [row.arm, _phase(memory), number(sum(memory["by_kind"].values()) / size)]
            + [number(memory["by_kind"].get(kind, 0) / size) for kind in kinds]
            for row, memory in known
        ],
    )
    keys = tuple(drawing.kind_key(n, word) for n, word in enumerate(words))
    sizes = {row.arm: [memory["by_kind"].get(kind, 0) / size for kind in kinds] for row, memory in known}
    spec = drawing.memory_spec(sizes, keys, unit, caption)
    return Chart("memory_by_kind", "Memory at the peak, by kind", caption, spec, cells, keys)


def _phase(memory: dict[str, Any]) -> str:
    return {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}.get(
        memory["phase"], memory["phase"]
    )
