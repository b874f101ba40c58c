"""Op maps as text: tables for a terminal, the sentences that sum a map up, and the plain lines of a golden file.

Refuses to know how maps are made. No torch.
"""

import io
import textwrap
from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from precision_lab.probe.op_rows import LOW, Difference, OpRow, by_operation, totals
from precision_lab.sizes import MIB, size

_COUNTED = "Counted are matmuls, convolutions and attention, forward and backward."
FIRST = 5  # differences that are named where predicted and real maps disagree


def render(rows: Iterable[OpRow], *, by_module: bool, width: int) -> str:
    """Plain text of at most `width` columns: operations, casts, and what share runs in low precision.

    With `by_module` each block of rows is headed by its module ("" prints as "(model)"), else modules are added up.
    """
    rows = list(rows) if by_module else by_operation(rows)
    text = io.StringIO()
    console = _console(text, width)
    for title, part in (
        ("operations", [row for row in rows if not row.is_cast]),
        ("casts", [row for row in rows if row.is_cast]),
    ):
        everything = sum(row.nbytes for row in rows) if title == "casts" else 0
        if part:
            _print_table(console, part, by_module, everything)
        else:
            console.print(f"no {title}")
        console.print()
    text.write(filled(summary(rows), width))
    return _stripped(text)


def summary(rows: Iterable[OpRow]) -> list[str]:
    """Which share of the arithmetic runs in low precision, and what casts move, each a sentence."""
    found = totals(rows)
    by_dtype = ", ".join(f"{flop(n)}FLOP in {dtype}" for dtype, n in found.flops_in.items())
    if not found.flops:
        sentences = ["No operation whose FLOPs torch has a formula for."]
    elif len(found.flops_in) == 1:
        sentences = [f"All of the arithmetic, {by_dtype.replace(' in ', ', runs in ')}. {_COUNTED}"]
    else:
        low = " and ".join(dtype for dtype in found.flops_in if dtype in LOW) or "low precision"
        sentences = [f"{found.low_share:.1%} of the arithmetic runs in {low}: {by_dtype}. {_COUNTED}"]
    if found.uncounted:
        calls = ", ".join(f"{n} of {op}" for op, n in found.uncounted.items())
        sentences.append(f"Not counted, since torch has no formula: calls, {calls}.")
    if found.casts:
        sentences.append(
            f"{found.casts} casts read and write {_size(found.cast_bytes)}, {found.cast_share:.1%} of the "
            f"{_size(found.all_bytes)} that all operations of forward and backward read and write."
        )
    return sentences


def render_differences(found: list[Difference], names: tuple[str, str], *, by_module: bool, width: int) -> str:
    """Plain text of at most `width` columns: the dtypes that operations give in either map.

    Not `by_module`: equal differences are one row, which says in how many modules.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("module" if by_module else "modules", overflow="fold")
    table.add_column("phase", no_wrap=True)
    table.add_column("op", overflow="fold", min_width=min(max((len(one.op) for one in found), default=0), width // 3))
    for name in names:
        table.add_column(name, overflow="fold")
    modules: dict[tuple, list[str]] = {}
    for one in found:
        key = (one.phase, one.op, one.first, one.second, *([one.module] if by_module else []))
        modules.setdefault(key, []).append(one.module or "(model)")
    for key, where in modules.items():
        phase, op, first, second = key[:4]
        shown = where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"
        table.add_row(shown, phase, op, ", ".join(first) or "-", ", ".join(second) or "-")
    text = io.StringIO()
    _console(text, width).print(table)
    return _stripped(text)


def filled(sentences: Iterable[str], width: int) -> str:
    """Each sentence on lines of its own, of at most `width` columns where its words allow."""
    return "\n".join(textwrap.fill(one, width, break_long_words=False, break_on_hyphens=False) for one in sentences)


def agreement(target: str, found: list[Difference], operations: int) -> str:
    """Whether the predicted map of `target` is the real one, and if not, where first. `operations` were compared."""
    head = f"Predicted and real map of {target}, the real one by torch's own kernels"
    if not found:
        return f"{head}, agree in all {operations} operations of its modules."
    named = "; ".join(
        f"{one.op} in {one.module or '(model)'}, {one.phase}: predicted {', '.join(one.first) or 'none'}, "
        f"real {', '.join(one.second) or 'none'}"
        for one in found[:FIRST]
    )
    more = f"; and {len(found) - FIRST} more" if len(found) > FIRST else ""
    return f"{head}, differ in {len(found)} of {operations} operations: {named}{more}."


def lines(rows: Iterable[OpRow]) -> str:
    """A map by module as text that is equal on every machine: a line an operation with calls and dtypes."""
    rows = list(rows)
    text = summary(rows)
    modules = list(dict.fromkeys(row.module for row in rows))
    for module, block in groupby(sorted(rows, key=lambda row: modules.index(row.module)), key=lambda row: row.module):
        text += ["", module or "(model)"]
        text += [
            f"  {row.phase:8}  {row.calls:3}  {'cast' if row.is_cast else row.op:37}  {row.dtypes}" for row in block
        ]
    return "\n".join(text) + "\n"


def flop(number: int) -> str:
    """`1.23 G`; with `FLOP` behind it, a number of operations."""
    value = float(number)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError  # the last prefix returns


def _print_table(console: Console, rows: list[OpRow], by_module: bool, everything: int) -> None:
    """Operations with their FLOPs; or casts with their bytes, where `everything` is what these are a share of.

    Each module heads its rows; columns are as wide in all blocks.
    """
    header = ["phase", "cast", "calls", "inputs -> outputs", "bytes", "share"]
    if not everything:
        header[1], header[4:] = "op", ["FLOP"]
    cells = [_cells(row, everything) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    indent = 2 if by_module else 0
    excess = indent + sum(widths) + 2 * (len(widths) - 1) - console.width
    widths[1] -= min(max(excess, 0), max(widths[1] - 12, 0))
    console.print(_block([header], widths, indent))
    for module, block in groupby(zip(rows, cells, strict=True), key=lambda pair: pair[0].module):
        if by_module:
            console.print(module or "(model)")
        console.print(_block([shown for _, shown in block], widths, indent))


def _block(rows: list[list[str]], widths: list[int], indent: int) -> Padding:
    table = Table(box=None, pad_edge=False, show_header=False)
    for i, column in enumerate(widths):
        table.add_column(width=column, overflow="fold", justify="right" if i in (2, 4, 5) else "left")
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, indent))


def _cells(row: OpRow, everything: int) -> list[str]:
    cells = [row.phase, row.op, str(row.calls), row.dtypes]
    if everything:
        return [*cells, _size(row.nbytes), f"{row.nbytes / everything:.1%}"]
    return [*cells, "-" if row.flops is None else flop(row.flops).strip()]


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"


def _console(text: io.StringIO, width: int) -> Console:
    return Console(file=text, width=width, color_system=None, markup=False, emoji=False, highlight=False)


def _stripped(text: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
