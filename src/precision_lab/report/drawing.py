"""How the charts are drawn: Vega-Lite specifications, built with Altair, that Vega turns into SVG in the page.

Each arm keeps one colour, dash and shape in all charts, each kind of memory one colour and number. The colours are
those of Okabe and Ito (2008), which colour-blind people tell apart. What a chart says is decided elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import altair

from precision_lab.ratios import MARGIN
from precision_lab.report.curves import Line

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2))
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right")
KIND_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#999999")
MARKERS = 5  # on a line of many points
PICTURE = 760  # pixels of a chart's width without a page, half of the file's
ROW = 40  # pixels of an arm in a chart with an arm a row
FAR = 10  # times the outermost points, where the axis of the speed ratios ends at the latest
LABELLED = 0.05  # of the longest bar: shorter parts have no room for their number
Spec = dict[str, Any]
_CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "axisY": {"labelLimit": {"expr": "max(90, 0.3 * containerSize()[0])"}},
}


@dataclass(frozen=True)
class Key:
    """One entry of a legend: how an arm is drawn, or a kind of memory (a number in place of dash and shape)."""

    label: str
    colour: str
    dash: tuple[int, ...] = ()
    shape: str = ""
    number: int | None = None
    ink: str = ""  # of the number on the colour


@dataclass(frozen=True)
class Speed:
    """A speed ratio of an arm to the reference arm."""

    arm: str
    label: str
    how: str  # it was timed
    word: str  # faster | slower | no practical difference | not resolved; "-" for a hint
    value: float
    low: float | None  # of the 95 % interval; None for one pair
    high: float | None
    pairs: int


def arm_key(place: int, label: str) -> Key:
    """How the arm of that place among all is drawn."""
    return Key(label, _cue(COLOURS, place), _cue(DASHES, place), _cue(SHAPES, place))


def kind_key(place: int, word: str) -> Key:
    """How a kind of memory is drawn."""
    colour = _cue(KIND_COLOURS, place)
    return Key(word, colour, number=place + 1, ink="#ffffff" if colour == COLOURS[0] else "#000000")


def _cue(cues: Sequence[Any], place: int) -> Any:
    # of more arms than cues the second round pairs colour and dash otherwise
    turn = place // len(cues)
    return cues[(place + (turn if cues in (DASHES, SHAPES) else 0)) % len(cues)]


# --- lines over the steps ----------------------------------------------------------------------------------------


def line_spec(
    lines: list[Line], looks: dict[str, Key], told: dict[int, list[str]], axis: tuple[str, Spec, str], caption: str
) -> Spec:
    """Means with bands over steps; `told` has, for each step, the text of every line that is shown on hover.

    `axis` is the vertical one's title and scale, and how a line goes on between its points.
    """
    title, scale, bend = axis
    names = [f"line{n}" for n in range(len(lines))]  # a label may hold what Vega reads as a path
    values = [
        {"line": name, "step": point.step} | {end: _digits(getattr(point, end)) for end in ("mean", "low", "high")}
        for name, line in zip(names, lines, strict=True)
        for point in line.points
    ]
    x = altair.X("step:Q", title="training step").axis(grid=False, tickCount=6, labelFlush=True, labelOverlap=True)
    x = x.scale(nice=False, zero=True)
    y = altair.Y("mean:Q", title=title).scale(**scale).axis(tickCount=6)
    keys, below = [looks[line.arm] for line in lines], next(iter(looks))  # seen beneath a line that covers it
    colour = altair.Color("line:N", legend=None).scale(domain=names, range=[key.colour for key in keys])
    dash = altair.StrokeDash("line:N", legend=None).scale(domain=names, range=[list(key.dash) for key in keys])
    shape = altair.Shape("line:N", legend=None).scale(domain=names, range=[key.shape for key in keys])
    width = altair.StrokeWidth("line:O", legend=None).scale(
        domain=names, range=[1 if line.diverged else 3.5 if line.arm == below else 2 for line in lines]
    )
    drawn = _drawn("values")
    band = drawn.mark_area(opacity=0.15, aria=False, interpolate=bend).encode(
        x, altair.Y("low:Q"), altair.Y2("high:Q"), colour
    )
    path = drawn.mark_line(aria=False, interpolate=bend).encode(x, y, colour, dash, width)
    marks = _drawn("markers").mark_point(filled=True, size=45, aria=False)
    ends = _drawn("ends").mark_point(shape="cross", angle=45, filled=True, size=90, aria=False)
    # on hover: a rule at the nearest step, and what all lines say there
    near = altair.selection_point(name="near", on="pointerover", clear="pointerout", fields=["step"], empty=False)
    tips = [altair.Tooltip("step:Q", title="step", format=",")]
    tips += [altair.Tooltip(f"{name}:N", title=line.label) for name, line in zip(names, lines, strict=True)]
    rule = _drawn("told").mark_rule(strokeWidth=1.5, aria=False).properties(name="hover")
    rule = rule.encode(x, opacity=altair.condition(near, altair.value(0.6), altair.value(0)))
    area = _drawn("told").mark_rect(opacity=0, aria=False).properties(name="areas")
    area = area.encode(altair.X("from:Q"), altair.X2("to:Q"), tooltip=tips).add_params(near)
    layers = [band, path, marks.encode(x, y, colour, shape), rule]
    if any(line.diverged for line in lines):
        layers.append(ends.encode(x, y, colour))
    texts = [place | dict(zip(names, told[place["step"]], strict=True)) for place in _areas(list(told))]
    sets = {"values": values, "markers": list(_markers(names, lines)), "ends": list(_ends(names, lines)), "told": texts}
    return _spec(altair.layer(*layers, area), 260, caption, sets)


def _digits(value: float) -> float:
    """More of them would double the page and move no pixel."""
    return float(f"{value:.6g}")


def _areas(steps: list[int]) -> Iterator[dict[str, float]]:
    """Each step with the part of the axis that is nearer to it than to any other."""
    for before, step, after in zip([steps[0], *steps], steps, [*steps[1:], steps[-1]], strict=False):
        yield {"step": step, "from": (before + step) / 2 if before < step else step - 1, "to": (step + after) / 2}


def _markers(names: list[str], lines: list[Line]) -> Iterator[dict[str, Any]]:
    for name, line in zip(names, lines, strict=True):
        if not line.diverged:
            stride = max(1, len(line.points) // MARKERS)
            yield from ({"line": name, "step": p.step, "mean": p.mean} for p in line.points[::-1][::stride])


def _ends(names: list[str], lines: list[Line]) -> Iterator[dict[str, Any]]:
    for name, line in zip(names, lines, strict=True):
        if line.diverged:
            yield {"line": name, "step": line.points[-1].step, "mean": line.points[-1].mean}


# --- speed ratios ------------------------------------------------------------------------------------------------


def speed_spec(speeds: list[Speed], looks: dict[str, Key], told: list[str], caption: str) -> Spec:
    """A point and interval for each ratio; `told` is each one's text on hover."""
    low, high = _reach(speeds)
    wide = high > 3 * low
    ticks = {"values": _ticks(low, high), "format": "~g"} if wide else {"tickCount": 6}
    scale = altair.Scale(type="log" if wide else "linear", domain=[low, high], nice=False, clamp=True)
    title = f"times the reference's speed{' (log scale)' if wide else ''}"
    at, start = (
        altair.X(
            f"{field}:Q", title=title, scale=scale, axis=altair.Axis(**ticks, labelOverlap=True, labelSeparation=6)
        )
        for field in ("value", "low")
    )
    y = altair.Y("label:N", title=None, sort=[one.label for one in speeds]).axis(ticks=False, domain=False)
    y = y.scale(padding=0.5)
    keys = {one.arm: looks[one.arm] for one in speeds}
    names = [f"arm{n}" for n in range(len(keys))]
    name_of = dict(zip(keys, names, strict=True))
    colour, shape = (
        altair.Color("arm:N", legend=None).scale(domain=names, range=[key.colour for key in keys.values()]),
        altair.Shape("arm:N", legend=None).scale(domain=names, range=[key.shape for key in keys.values()]),
    )
    values = [
        {"arm": name_of[one.arm], "label": one.label, "how": one.how, "value": one.value,
         "low": one.value if one.low is None else one.low, "high": one.value if one.high is None else one.high,
         "told": text, "pairs": one.pairs}
        for one, text in zip(speeds, told, strict=True)
    ]  # fmt: skip
    tips = [
        altair.Tooltip(f"{field}:N", title=name)
        for field, name in {"label": "arm", "told": "speed ratio", "how": "how", "pairs": "pairs"}.items()
    ]
    band = _drawn("margin").mark_rect(opacity=0.155, aria=False, color="#888888").encode(at, altair.X2("high:Q"))
    even = _drawn("even").mark_rule(strokeDash=[4, 3], aria=False)
    even = even.properties(name="reference").encode(at)
    drawn = _drawn("values")
    span = drawn.mark_rule(strokeWidth=3, aria=False).encode(start, altair.X2("high:Q"), y, colour, tooltip=tips)
    point = drawn.mark_point(filled=True, size=110, opacity=1).encode(at, y, colour, shape, tooltip=tips)
    sets = {
        "values": values, "even": [{"value": 1}], "margin": [{"value": 1 - MARGIN, "high": 1 + MARGIN}]
    }  # fmt: skip
    return _spec(altair.layer(band, even, span, point), ROW * len(speeds), caption, sets)


def _reach(speeds: list[Speed]) -> tuple[float, float]:
    """The ends of the axis: an interval that leads far beyond the points is cut there."""
    points = [1 - MARGIN, 1 + MARGIN, *(one.value for one in speeds)]
    low, high = min(points) / FAR, max(points) * FAR
    ends = [min(max(end, low), high) for one in speeds for end in (one.low, one.high) if end is not None]
    return min(points + ends) / 1.02, max(points + ends) * 1.02


def _ticks(low: float, high: float) -> list[float]:
    steps = (1,) if high > 100 * low else (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    known = [step * 10.0**power for power in range(-9, 10) for step in steps]
    return [tick for tick in known if low <= tick <= high]


# --- memory ------------------------------------------------------------------------------------------------------


def _parts(arm: str, sizes: list[float], keys: tuple[Key, ...], longest: float) -> Iterator[dict[str, Any]]:
    for n, (start, size) in enumerate(zip(accumulate(sizes, initial=0.0), sizes, strict=False)):
        if size > 0:
            label = str(n + 1) if size >= LABELLED * longest else ""
            place = {"start": start, "middle": start + size / 2, "end": start + size, "size": size}
            yield {"arm": arm, "kind": keys[n].label, "number": label, "ink": keys[n].ink} | place


def memory_spec(sizes: dict[str, list[float]], keys: tuple[Key, ...], unit: str, caption: str) -> Spec:
    """A bar for each arm, of one part for each key; `sizes` are in `unit`."""
    arms, longest = list(sizes), max(map(sum, sizes.values()))
    parts = [part for arm, one in sizes.items() for part in _parts(arm, one, keys, longest)]
    y = altair.Y("arm:N", title=None, sort=arms).axis(ticks=False, domain=False).scale(padding=0.25)
    x = altair.X("start:Q", title=unit).axis(tickCount=6).scale(nice=False)
    colour = altair.Color("kind:N", legend=None).scale(
        domain=[key.label for key in keys], range=[key.colour for key in keys]
    )
    tips = [altair.Tooltip("arm:N"), altair.Tooltip("kind:N"), altair.Tooltip("size:Q", title=unit, format=",.4~g")]
    drawn = _drawn("values")
    bars = drawn.mark_bar(stroke="white", strokeWidth=1).encode(x, altair.X2("end:Q"), y, colour, tooltip=tips)
    numbers = drawn.mark_text(fontSize=12, aria=False).encode(
        altair.X("middle:Q"), y, altair.Text("number:N"), altair.Color("ink:N", scale=None), tooltip=tips
    )
    return _spec(altair.layer(bars, numbers), ROW * len(arms), caption, {"values": parts})


# --- all ---------------------------------------------------------------------------------------------------------


def _drawn(name: str) -> altair.Chart:
    """Of one of the data sets that `_spec` is given: Altair would check each value of one it knows."""
    return altair.Chart(altair.NamedData(name))


def _spec(chart: altair.LayerChart, height: int, caption: str, sets: dict[str, list[dict[str, Any]]]) -> Spec:
    made = chart.properties(width="container", height=height, description=caption).to_dict()
    made |= {"config": _CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}, "datasets": sets}
    return {key: value for key, value in made.items() if key != "$schema"}


# --- pictures ----------------------------------------------------------------------------------------------------


def picture(spec: Spec, keys: Sequence[Key], title: str, below: str) -> bytes:
    """A PNG of a chart, with title, subtitle and legend: alone, it has no page around it."""
    import vl_convert

    config = _CONFIG | {
        "background": "white",
        "axisY": {"labelLimit": 0.3 * PICTURE},  # a page's is by its width
        "title": {"anchor": "start", "fontSize": 15, "subtitleFontSize": 12, "offset": 12, "limit": PICTURE},
    }
    chart = {key: value for key, value in spec.items() if key not in ("config", "autosize", "datasets")}
    whole = {
        "title": {"text": title, "subtitle": below},
        "vconcat": [*([_legend(keys)] if keys else []), chart | {"width": PICTURE}],
        "datasets": spec["datasets"],
        "config": config,
    }
    return vl_convert.vegalite_to_png(whole, scale=2)


def _legend(keys: Sequence[Key]) -> Spec:
    """As the page has it in HTML: line and marker of an arm, or number on a colour, with the label."""
    wide = min(PICTURE, 60 + 8 * max(len(key.label) for key in keys))  # pixels of an entry
    columns = max(1, PICTURE // wide)
    values = [
        {"label": key.label, "colour": key.colour, "dash": list(key.dash), "shape": key.shape or "square",
         "number": key.number, "ink": key.ink, "size": 80 if key.shape else 300, "y": 20 * (n // columns) + 10,
         **{name: wide * (n % columns) + x for name, x in (("from", 0), ("middle", 18), ("to", 36), ("label_at", 44))}}
        for n, key in enumerate(keys)
    ]  # fmt: skip
    y = altair.Y("y:Q", scale=None, axis=None)
    x, middle, beside = (altair.X(f"{at}:Q", scale=None, axis=None) for at in ("from", "middle", "label_at"))
    colour, ink = (altair.Color(f"{name}:N", scale=None) for name in ("colour", "ink"))
    drawn = altair.Chart(altair.Data(values=values)).properties(width=PICTURE, height=20 * -(-len(keys) // columns))
    line = drawn.mark_rule(strokeWidth=2).encode(
        x, altair.X2("to:Q"), y, colour, altair.StrokeDash("dash:N", scale=None)
    )
    shape, size = altair.Shape("shape:N", scale=None), altair.Size("size:Q", scale=None)
    mark = drawn.mark_point(filled=True, opacity=1).encode(middle, y, colour, shape, size)
    number = drawn.mark_text(fontSize=12).encode(middle, y, ink, altair.Text("number:Q"))
    label = drawn.mark_text(align="left", fontSize=12, limit=wide - 50).encode(beside, y, altair.Text("label:N"))
    parts = [line, mark] if keys[0].shape else [mark, number]
    return {
        key: value for key, value in altair.layer(*parts, label).to_dict().items() if key not in ("$schema", "config")
    }


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one text for a script element: they set `window.vegaEmbed`."""
    import vl_convert  # starts an interpreter of its own

    return vl_convert.javascript_bundle()
