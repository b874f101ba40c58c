"""The tables and lines of a comparison, which terminal, Markdown and page share, and how a terminal shows them.

GiB = 2^30 and MiB = 2^20 bytes.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precision_lab.report.compare import AGAINST, Comparison, Row, sample
from precision_lab.report.loss import losses_of, reaches_of
from precision_lab.report.read import Found, plain
from precision_lab.report.reading import between, difference, horizon, machine, ratio, reading, unless_exact
from precision_lab.report.verdict import verdict_of
from precision_lab.report.warnings import warnings_of

IN_TURN = (
    "ms/step and samples/s are of training runs made one after the other, so they may contradict a speed ratio timed "
    "in alternation, which then counts."
)
LEGEND = (
    "(a to b): smallest and largest of the runs; [a, b]: 95 % interval of the mean over pairs of runs of one seed. "
    "speed ratio: step time of the reference arm over the arm's, by pairs of blocks where a benchmark timed the two in "
    "alternation. saved: activations kept for backward. "
    f"{IN_TURN} ms/step is the median of the runs, the rest are means; the spread of each is in the CSV and JSON. "
    "verdict: on the loss, within the experiment's margin; worse and better take a 95 % interval. to target: steps, "
    "and seconds of training, of the median run until its validation loss came within the margin of the reference "
    "arm's final one with the same seed. curve: mean difference of the loss over all evaluations."
)
# More comparisons than this are left to the files, and more of one kind of anything to the JSON.
SHOWN = 20
NAMED = 4
# On a terminal the longest a label, the runs' statuses or a header may be before it is folded.
WIDEST = {"first": 40, "runs": 24, "header": 26}
GAP = 2  # columns of space between two of a table
Cells = tuple[list[str], list[list[str]]]  # header, rows


@dataclass(frozen=True)
class Column:
    """One column: its header and what it says of a row."""

    header: str
    cell: Callable[[Row], str]


def number(value: float) -> str:
    """Four digits that count: `0.1148`, `42,953`, `65,536`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def spread(values: list[float]) -> str:
    """`5,400 (3,600 to 7,200)`: the mean, and of several the smallest and largest."""
    known = sample(values)
    around = f" ({number(known.low)} to {number(known.high)})" if known.n > 1 else ""
    return number(known.mean) + around


def _mean(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: number(row.figures[name].mean * scale) if name in row.figures else "-"


def _from_to(name: str) -> Callable[[Row], str]:
    """Of counts, which differ from run to run or not."""

    def cell(row: Row) -> str:
        known = row.figures.get(name)
        if known is None:
            return "-"
        return number(known.low) if known.low == known.high else f"{number(known.low)} to {number(known.high)}"

    return cell


def _step_ms(row: Row) -> str:
    known = row.figures.get("step_ms")
    if known is None:
        return "emulated" if row.emulates else "-"
    spread = f" ({number(known.low)} to {number(known.high)})" if known.n > 1 else ""
    return number(known.median) + spread


def _against(name: str, form: Callable[[float], str] = ratio, itself: str = "1") -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if name in row.against:
            return between(row.against[name], form)
        return itself if AGAINST[name][0] in row.figures and row.is_reference else "-"

    return cell


def _share(name: str) -> Callable[[Row], str]:
    """A ratio of memory, which seldom varies."""
    return lambda row: unless_exact(row.against[name], ratio) if name in row.against else _against(name)(row)


def _pairs(row: Row) -> str:
    return str(row.against["loss_difference"].pairs) if "loss_difference" in row.against else "-"


def _sd(row: Row) -> str:
    known = row.figures.get("val_loss_fp32")
    return f"{known.sd:.2g}" if known and known.sd is not None else "-"


def _statuses(row: Row) -> str:
    return ", ".join(f"{n} {status}" for status, n in row.statuses.items())


def blocks(comparison: Comparison) -> list[list[Column]]:
    """Speed, memory and loss, each narrow enough for 80 columns where labels are short."""
    arm = Column("arm", lambda row: row.arm)
    rows = comparison.rows
    peaks = [row.figures["peak_allocated_gib"].mean for row in rows if "peak_allocated_gib" in row.figures]
    measured = any("val_accuracy" in row.figures for row in rows)
    accuracy = [Column("accuracy", _mean("val_accuracy"))] if measured else []
    jumped = any("spike_score" in row.figures and row.figures["spike_score"].high > 0 for row in rows)
    spikes = [Column("spikes %", _mean("spike_score", 100))] if jumped else []
    losses = losses_of(comparison)
    unit, scale = ("GiB", 1.0) if max(peaks, default=0.0) >= 1 else ("MiB", 1024.0)
    return [
        [
            arm,
            Column("runs", _statuses),
            Column("ms/step (range)", _step_ms),
            Column("samples/s", _mean("samples_per_s")),
            Column("speed ratio", _against("speed_ratio")),
        ],
        [
            arm,
            Column(f"peak {unit}", _mean("peak_allocated_gib", scale)),
            Column("ratio", _share("peak_ratio")),
            Column("saved MiB", _mean("saved_activations_mib")),
            Column("ratio", _share("saved_ratio")),
            Column("skipped", _from_to("skipped_steps")),
            Column("loss scale", _from_to("loss_scale")),
        ],
        [
            arm,
            Column("val loss in fp32", _mean("val_loss_fp32")),
            Column("sd", _sd),
            Column("minus reference, by seed", _against("loss_difference", difference, "0")),
            Column("pairs", _pairs),
            Column("verdict", lambda row: losses[row.arm].word if row.arm in losses else "-"),
            *accuracy,
            *_of_curves(comparison),
            *spikes,
        ],
    ]


def _of_curves(comparison: Comparison) -> list[Column]:
    """Of arms whose loss was evaluated on the way, too."""
    losses, reaches = losses_of(comparison), reaches_of(comparison)

    def to_target(row: Row) -> str:
        reach = reaches.get(row.arm)
        if not reach:
            return "-"
        missed = f", {reach.runs - reach.reached} of {reach.runs} never" if reach.reached < reach.runs else ""
        seconds = f" ({number(reach.train_s)} s)" if reach.train_s is not None else ""
        return f"{number(reach.steps)}{seconds}{missed}" if reach.steps else missed.strip(", ")

    def area(row: Row) -> str:
        known = row.arm in losses and losses[row.arm].area
        return between(known, difference) if known else "-"

    columns = [Column("to target", to_target)] if reaches else []
    return columns + ([Column("curve %", area)] if any(loss.area for loss in losses.values()) else [])


def cells_of(columns: list[Column], rows: list[Row]) -> Cells:
    """The columns' headers, and what they say of each row."""
    return [column.header for column in columns], [[column.cell(row) for column in columns] for row in rows]


def title(comparison: Comparison) -> str:
    """The experiment by its name and signature."""
    return f"{comparison.name} ({comparison.experiment})"


def hardware_label(fingerprint: dict[str, Any]) -> str:
    """`2-core Intel Xeon Processor, threads 2, 16 GiB`."""
    threads = f", threads {fingerprint.get('threads')}" if fingerprint.get("device") == "cpu" else ""
    return f"{machine(fingerprint)}{threads}, {fingerprint.get('memory_gib')} GiB"


def headline(comparison: Comparison) -> str:
    """The verdict's, with what it is about: `night on NVIDIA H200: Train with bf16.`"""
    return plain(f"{comparison.name} on {machine(comparison.fingerprint)}: {verdict_of(comparison).headline}")


def subtitle(comparison: Comparison) -> list[str]:
    """On what and how it was run, and why it is no part of the table above."""
    config, last = comparison.config, comparison.newest
    able = ", ".join(f"{name} {word}" for name, word in last.support.items() if name != "float32")
    lines = [
        f"{hardware_label(comparison.fingerprint)}; {able}",
        f"torch {last.versions.get('torch')}; {horizon(config)}",
    ]
    if comparison.differs:
        words = ("not comparable with the one above", "the same experiment as above on other hardware")
        shown = [f"{key} {_value(a)} there, {_value(b)} here" for key, (a, b) in comparison.differs.items()]
        more = f" and {len(shown) - NAMED} more keys" if len(shown) > NAMED else ""
        lines.append(f"{words[comparison.akin]}: {'; '.join(shown[:NAMED])}{more}")
    return [plain(line) for line in lines]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# --- across hardware -------------------------------------------------------------------------------------------


def across(comparisons: list[Comparison]) -> list[list[Comparison]]:
    """Comparisons of one experiment on one set of data that were made on several kinds of hardware."""
    groups: dict[tuple[str, str | None], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.experiment, comparison.data), []).append(comparison)
    return [group for group in groups.values() if len(group) > 1]


def across_blocks(group: list[Comparison]) -> Iterator[tuple[str, Cells]]:
    """(what the cells say, hardware x arm)."""
    reference = group[0].reference_name
    captions: dict[str, Callable[[Row], str]] = {
        f"ms a step (speed ratio to {reference} on the same hardware)": _both("step_ms", "speed_ratio"),
        f"saved activations in MiB (ratio to {reference})": _both("saved_activations_mib", "saved_ratio"),
        "validation loss in fp32 (sd)": _loss,
    }
    arms = list(dict.fromkeys(row.arm for one in group for row in one.rows))
    for caption, cell in captions.items():
        lines = []
        for one in group:
            row_of = {row.arm: row for row in one.rows}
            cells = [cell(row_of[arm]) if arm in row_of else "-" for arm in arms]
            lines.append([hardware_label(one.fingerprint), *cells])
        yield f"{caption}, runs as above", (["hardware", *arms], lines)


def _both(figure: str, name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = number(row.figures[figure].median) if figure in row.figures else "-"
        return f"{value} ({unless_exact(row.against[name], ratio)})" if name in row.against else value

    return cell


def _loss(row: Row) -> str:
    sd = _sd(row)
    return _mean("val_loss_fp32")(row) + (f" ({sd})" if sd != "-" else "")


# --- what was left out -------------------------------------------------------------------------------------------


def only(found: Found) -> list[str]:
    """The conditions that all runs fit, if any."""
    return [plain(f"only runs with {' and '.join(found.where)}")] if found.where else []


def skipped_lines(found: Found) -> list[str]:
    """What was left out, a line for each reason."""
    return [f"left out, {line}" for line in by_reason(found.skipped)]


def by_reason(skipped: list[tuple[str, str]]) -> list[str]:
    """A line for each reason, with the folders; many folders of one reason are counted."""
    reasons: dict[str, list[str]] = {}
    for folder, reason in skipped:
        reasons.setdefault(reason, []).append(folder)
    lines = []
    for reason, folders in reasons.items():
        more = f" and {len(folders) - NAMED} more" if len(folders) > NAMED else ""
        lines.append(f"{reason}: {', '.join(folders[:NAMED])}{more}")
    return lines


# --- terminal ------------------------------------------------------------------------------------------------


def show(comparisons: list[Comparison], found: Found, console: Console) -> None:
    """Print all to a terminal; at most SHOWN comparisons."""
    for line in only(found):
        console.print(Text(f"{line}\n"))
    for comparison in comparisons[:SHOWN]:
        console.print(Text(title(comparison), style="bold"))
        for line in subtitle(comparison):
            console.print(Text(line))
        verdict = verdict_of(comparison)
        console.print(Text(f"\n{verdict.headline}", style="bold"))
        console.print(Text(" ".join(verdict.sentences)))
        console.print(Text(f"next: {verdict.command}"), soft_wrap=True)  # to be copied whole
        for columns in blocks(comparison):
            print_tables(cells_of(columns, comparison.rows), console)
        cautions = [f"! {text}" for _, text in warnings_of(comparison)]
        for lines, style in ((reading(comparison), ""), (cautions, "yellow")):
            if lines:
                console.print(Text("\n" + "\n".join(lines), style=style))
        console.print()
    if (more := len(comparisons) - SHOWN) > 0:
        console.print(Text(f"{more} more comparisons are in the files; --where chooses among all.\n", style="yellow"))
    for group in across(comparisons)[:SHOWN]:
        console.print(Text(f"{title(group[0])} across hardware", style="bold"))
        for caption, cells in across_blocks(group):
            console.print(Text(f"\n{caption}"))
            print_tables(cells, console)
        console.print()
    for line in skipped_lines(found):
        console.print(Text(line, style="yellow"))
    console.print(Text(f"{LEGEND}\n", style="dim"))
    for comparison in comparisons[:SHOWN]:  # where a terminal's reader stands in the end
        console.print(Text(headline(comparison), style="bold"))


def print_tables(cells: Cells, console: Console) -> None:
    """Print one table, or several that each begin with the first column where one is too wide: no figure is cut."""
    header, rows = cells
    widths = [_width(place, name, [row[place] for row in rows]) for place, name in enumerate(header)]
    widths[0] = min(widths[0], max(8, console.width - GAP - max(widths[1:])))  # each column fits beside the first
    parts = [[0]]
    for place in range(1, len(header)):
        if len(parts[-1]) > 1 and sum(widths[n] + GAP for n in [*parts[-1], place]) - GAP > console.width:
            parts.append([0])
        parts[-1].append(place)
    for chosen in parts:
        console.print()
        console.print(_rich(cells, widths, chosen))


def _width(place: int, header: str, cells: list[str]) -> int:
    longest = max(map(cell_len, cells), default=0)
    if is_text(place, header):
        return max(len(header), min(longest, WIDEST["runs" if place else "first"]))
    return max(longest, min(cell_len(header), WIDEST["header"]))


def _rich(cells: Cells, widths: list[int], chosen: list[int]) -> Table:
    header, rows = cells
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for n in chosen:
        justify = "left" if is_text(n, header[n]) else "right"
        table.add_column(Text(header[n]), justify=justify, overflow="fold", width=widths[n])
    for row in rows:
        table.add_row(*(Text(row[n]) for n in chosen))
    return table


def is_text(place: int, header: str) -> bool:
    """Whether a column holds words, not figures."""
    return place == 0 or header == "runs"
