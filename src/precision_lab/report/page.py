"""The report page: comparisons as one HTML file that needs nothing else, no network least of all.

What stands in it is said here; how it looks is said in page.html.j2 and page.css. All text of the user's, such as
labels, folders and reasons, is escaped by the template.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from precision_lab.report import charts, drawing, render
from precision_lab.report.compare import Comparison
from precision_lab.report.loss import reaches_of
from precision_lab.report.read import Found, Run, plain
from precision_lab.report.reading import reading
from precision_lab.report.render import Cells, number
from precision_lab.report.timed import benchmark_command
from precision_lab.report.verdict import Verdict, verdict_of
from precision_lab.report.warnings import warnings_of

TABLES = ("Speed", "Memory", "Loss")
# The markers of a legend, in a box of 38 by 14.
_OUTLINES = {
    "circle": "M14.5 7a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "square": "M15 3h8v8h-8z",
    "triangle-up": "M19 2l5 9h-10z",
    "diamond": "M19 1.5l4.5 5.5l-4.5 5.5l-4.5 -5.5z",
    "triangle-down": "M19 12l5 -9h-10z",
    "triangle-right": "M24 7l-9 -5v10z",
}


_OF_A_SWEEP = set(",'\"[]{}()\\ ")  # characters that mean something in a list of values


@dataclass(frozen=True)
class Section:
    """One comparison, as the template writes it."""

    anchor: str
    title: str
    hardware: str
    lines: list[str]
    verdict: Verdict
    tables: list[tuple[str, Cells]]
    on_speed: str  # below the first of them
    keys: list[drawing.Key]
    charts: list[charts.Chart]
    problems: list[str]
    warnings: list[str]
    reading: list[str]
    environment: list[tuple[str, str]]
    command: str
    benchmark: str  # its command


def sections_of(comparisons: list[Comparison], price_per_hour: float | None = None) -> list[Section]:
    """One for each of at most render.SHOWN comparisons. A price adds what a run costs."""
    shown = comparisons[: render.SHOWN]
    looks = charts.looks_of(shown)
    return [_section(n, one, looks, price_per_hour) for n, one in enumerate(shown, 1)]


def page(
    comparisons: list[Comparison],
    found: Found,
    price_per_hour: float | None = None,
    sections: list[Section] | None = None,
) -> str:
    """The whole file. `sections` are what `sections_of` gave for the same comparisons and price, if it was asked."""
    sections = sections or sections_of(comparisons, price_per_hour)
    specs = {
        f"{section.anchor}-chart{n}": chart.spec for section in sections for n, chart in enumerate(section.charts, 1)
    }
    lines = render.only(found)
    if (more := len(comparisons) - len(sections)) > 0:
        lines.append(f"{more} more comparisons are in comparison.md, .csv and .json; --where chooses among all.")
    groups = [
        {"title": render.title(group[0]), "tables": [_capital(one) for one in render.across_blocks(group)]}
        for group in render.across(comparisons)[: render.SHOWN]
    ]
    environment = Environment(
        loader=PackageLoader("precision_lab.report", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        lines=lines,
        sections=sections,
        groups=groups,
        left_out=render.skipped_lines(found),
        legend_text=render.LEGEND,
        is_text=_is_text,
        outlines=_OUTLINES,
        style=_own("page.css"),
        script=_own("page.js"),
        javascript=Markup(drawing.javascript()) if specs else "",
        specs=_as_script(specs),
    )


def _own(name: str) -> Markup:
    return Markup(files("precision_lab.report").joinpath(name).read_text(encoding="utf-8"))


def _as_script(values: Any) -> Markup:
    """JSON that no text in it can end the script element of."""
    return Markup(json.dumps(values, allow_nan=False).replace("<", "\\u003c"))


def _is_text(place: int, header: str) -> bool:
    return render.is_text(place, header) or header in ("how", "verdict", "phase of the peak")


def _capital(table: tuple[str, Cells]) -> tuple[str, Cells]:
    return table[0][0].upper() + table[0][1:], table[1]


def _section(place: int, comparison: Comparison, looks: dict[str, drawing.Key], price: float | None) -> Section:
    figures = zip(TABLES, render.blocks(comparison), strict=True)
    tables = [(caption, render.cells_of(columns, comparison.rows)) for caption, columns in figures]
    if price is not None:
        tables.append(_cost(comparison, price))
    drawn, problems = charts.charts_of(comparison, looks)
    return Section(
        anchor=f"comparison{place}",
        title=render.title(comparison),
        hardware=render.hardware_label(comparison.fingerprint),
        lines=render.subtitle(comparison),
        verdict=verdict_of(comparison),
        tables=tables,
        on_speed=render.IN_TURN if any(row.timing for row in comparison.rows) else "",
        keys=[looks[row.arm] for row in comparison.rows],
        charts=drawn,
        problems=problems,
        warnings=list(dict.fromkeys(text for _, text in warnings_of(comparison))),
        reading=reading(comparison),
        environment=_environment(comparison),
        command=commands(comparison.runs),
        benchmark=benchmark_command(comparison),
    )


# --- what it was run with -------------------------------------------------------------------------------------


def _environment(comparison: Comparison) -> list[tuple[str, str]]:
    """What every run says of its machine and code; where runs differ, each value."""
    runs = comparison.runs
    versions = list(dict.fromkeys(name for run in runs for name in run.versions))
    told = [
        ("hardware", [render.hardware_label(comparison.fingerprint)]),
        *((key.replace("_gib", " in GiB"), [value]) for key, value in comparison.fingerprint.items()),
        *((f"{name} units", [word]) for name, word in comparison.newest.support.items()),
        *((name, [run.versions.get(name) for run in runs]) for name in versions),
        ("git", [_git(run) for run in runs]),
        ("host", [run.host for run in runs]),
    ]
    return [(plain(name), _distinct(values)) for name, values in told if _distinct(values)]


def _git(run: Run) -> str | None:
    sha = run.git.get("sha")
    return f"{sha}{', with changes that are not committed' if run.git.get('dirty') else ''}" if sha else None


def _distinct(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(plain(str(value)) for value in values if value is not None))


def commands(runs: list[Run]) -> str:
    """One command of a sweep where the runs fill a grid of overrides, else a line a run."""
    asked = list(dict.fromkeys(tuple(run.overrides) for run in runs))
    return _sweep(asked) or "\n".join(shlex.join(["python", "train.py", *words]) for words in asked)


def _sweep(asked: list[tuple[str, ...]]) -> str:
    """`python train.py -m model=mlp precision=fp32,bf16 seed=0,1`; "" where there is no such grid."""
    parsed = [dict(word.partition("=")[::2] for word in words) for words in asked]
    keys = list(parsed[0])
    plainly = all(list(one) == keys and len(one) == len(words) for one, words in zip(parsed, asked, strict=True))
    if len(asked) == 1 or not plainly or not all("=" in word for words in asked for word in words):
        return ""
    choices = {key: list(dict.fromkeys(one[key] for one in parsed)) for key in keys}
    grid = set(product(*choices.values()))
    swept = [value for values in choices.values() if len(values) > 1 for value in values]
    odd = any(not value or set(value) & _OF_A_SWEEP for value in swept)
    if odd or grid != {tuple(one.values()) for one in parsed}:
        return ""
    return shlex.join(["python", "train.py", "-m", *(f"{key}={','.join(of)}" for key, of in choices.items())])


# --- cost ------------------------------------------------------------------------------------------------------


def _cost(comparison: Comparison, price: float) -> tuple[str, Cells]:
    """Of training alone, as the curves timed it: to the end, and to the reference run's final loss of the same seed."""
    reaches = reaches_of(comparison)
    rows = []
    for row in comparison.rows:
        timed = [] if row.emulates else row.counted
        known = [run.curve["train_s"][-1] for run in timed if run.curve.get("train_s")]
        whole = [seconds for seconds in known if seconds is not None]
        reach = reaches.get(row.arm)
        to_target = [reach.train_s] if reach and reach.train_s is not None else []
        both = (*_priced(whole, price), *_priced(to_target, price))
        rows.append([row.arm, str(len(whole)), *both])
    caption = (
        f"Cost of training, at {number(price)} an hour, in the price's currency: the mean of the runs (smallest to "
        "largest), and to the target that of the median run. The runs were timed one after the other, a hint only"
    )
    return caption, (["arm", "runs", "s a run", "cost a run", "s to target", "cost to target"], rows)


def _priced(seconds: list[float], price: float) -> tuple[str, str]:
    """(seconds, cost), each the mean with its range."""
    if not seconds:
        return "-", "-"
    return render.spread(seconds), render.spread([one / 3600 * price for one in seconds])
