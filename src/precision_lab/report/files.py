"""A comparison as Markdown, as CSV (a line an arm) and as JSON (all figures)."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from precision_lab.ratios import Ratio
from precision_lab.recorder import STATUSES, storable
from precision_lab.report.compare import AGAINST, FIGURES, Comparison, Row
from precision_lab.report.loss import losses_of, reaches_of
from precision_lab.report.read import Found
from precision_lab.report.reading import reading
from precision_lab.report.render import (
    LEGEND,
    Cells,
    across,
    across_blocks,
    blocks,
    cells_of,
    hardware_label,
    is_text,
    only,
    skipped_lines,
    subtitle,
    title,
)
from precision_lab.report.timed import how_timed
from precision_lab.report.verdict import verdict_of
from precision_lab.report.warnings import ranges, warnings_of
from precision_lab.sizes import MIB

SCHEMA_VERSION = 1


def markdown(comparisons: list[Comparison], found: Found) -> str:
    """The same tables and sentences, all of them, for a page or a pull request."""
    parts = [_escape(line) for line in only(found)]
    for comparison in comparisons:
        parts += [f"## {_escape(title(comparison))}", *map(_escape, subtitle(comparison))]
        verdict = verdict_of(comparison)
        parts += [f"**{_escape(verdict.headline)}** {_escape(' '.join(verdict.sentences))}"]
        parts += [f"```bash\n{verdict.command}\n```"]
        parts += [_pipes(cells_of(columns, comparison.rows)) for columns in blocks(comparison)]
        parts += [_escape(" ".join(reading(comparison))), _escape(how_timed(comparison))]
        parts += ["\n".join(f"- {_escape(text)}" for _, text in warnings_of(comparison))]
    for group in across(comparisons):
        parts += [f"## {_escape(title(group[0]))} across hardware"]
        for caption, cells in across_blocks(group):
            parts += [_escape(caption[0].upper() + caption[1:]), _pipes(cells)]
    parts += ["\n".join(f"- {_escape(line)}" for line in skipped_lines(found)), _escape(LEGEND)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _pipes(cells: Cells) -> str:
    header, rows = cells
    rule = ["---" if is_text(place, name) else "---:" for place, name in enumerate(header)]
    lines = [map(_escape, header), rule, *(map(_escape, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\|*_<`[&~"})


def _escape(text: str) -> str:
    """A label or folder name is the user's own text."""
    return text.translate(_MARKS)


def as_csv(comparisons: list[Comparison]) -> str:
    """A line an arm: plain numbers, empty where not known."""
    header, rows = as_table(comparisons)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def as_table(comparisons: list[Comparison]) -> tuple[list[str], list[list[Any]]]:
    """(header, a row an arm): plain numbers, None where not known."""
    lines = [line for comparison in comparisons for line in _lines(comparison)]
    header = list(dict.fromkeys(key for line in lines for key in line))
    return header, [[line.get(key) for key in header] for line in lines]


def _lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    codes = " ".join(code for code, _ in warnings_of(comparison))
    for row in comparison.rows:
        line: dict[str, Any] = {
            "name": comparison.name,
            "experiment_signature": comparison.experiment,
            "data_hash": comparison.data,
            "hardware": hardware_label(comparison.fingerprint),
            **comparison.fingerprint,
            "arm": row.arm,
            "reference": comparison.reference_name,
            "seeds": ranges(sorted(run.seed for run in row.counted)),
            **{status: row.statuses.get(status, 0) for status in STATUSES if status != "running"},
        }
        for name in FIGURES:
            known = row.figures.get(name)
            parts = ("n", "mean", "sd", "median", "low", "high")
            line |= {f"{name}_{part}": getattr(known, part, None) for part in parts}
        for name in AGAINST:
            known = row.against.get(name)
            parts = ("", "_low", "_high", "_pairs")
            line |= {f"{name}{part}": getattr(known, part[1:] or "mean", None) for part in parts}
        in_turn = "in turn" if "speed_ratio" in row.against else None
        line["speed_timed"] = "in alternation" if row.timing else in_turn
        line["speed_verdict"] = row.timing.felt.word if row.timing else None
        yield line | _of_loss(comparison, row.arm) | _of_memory(row) | {"warnings": codes}


def _of_loss(comparison: Comparison, arm: str) -> dict[str, Any]:
    """The verdict on an arm's loss and the figures beside it, by column."""
    loss, reach = losses_of(comparison).get(arm), reaches_of(comparison).get(arm)
    area = loss and loss.area
    parts = ("margin", "mean", "low", "high", "real", "sd", "correlation", "p", "more_seeds")
    return (
        {"loss_verdict": getattr(loss, "word", None)}
        | {f"loss_verdict_{part}": getattr(loss, part, None) for part in parts}
        | {f"curve_percent{part}": getattr(area, part[1:] or "mean", None) for part in ("", "_low", "_high")}
        | {f"target_{part}": getattr(reach, part, None) for part in ("reached", "runs", "steps", "train_s")}
    )


def _timing(row: Row) -> dict[str, Any] | None:
    """What a benchmark says of the arm, with the word of each ratio."""
    if not row.timing:
        return None
    ratios = {name: ratio for name, ratio in vars(row.timing).items() if isinstance(ratio, Ratio)}
    return asdict(row.timing) | {name: asdict(ratio) | {"word": ratio.word} for name, ratio in ratios.items()}


def _of_memory(row: Row) -> dict[str, Any]:
    """What the arm's peak is made of, by column; nothing where that is not known."""
    if not row.memory:
        return {}
    by_kind = {f"peak_{kind}_mib": nbytes / MIB for kind, nbytes in row.memory["by_kind"].items()}
    return {"peak_phase": row.memory["phase"]} | by_kind


def as_json(comparisons: list[Comparison], found: Found) -> str:
    """All figures with the folders they are from, and what was left out; a line a comparison. A NaN is text."""
    lines = ",\n".join(json.dumps(storable(_plain(comparison)), allow_nan=False) for comparison in comparisons)
    skipped = json.dumps([{"folder": folder, "reason": reason} for folder, reason in found.skipped])
    where = json.dumps(found.where)
    return f'{{"schema": {SCHEMA_VERSION},\n"where": {where},\n"comparisons": [\n{lines}\n],\n"skipped": {skipped}}}\n'


def _plain(comparison: Comparison) -> dict[str, Any]:
    losses, reaches = losses_of(comparison), reaches_of(comparison)
    return {
        "name": comparison.name,
        "experiment_signature": comparison.experiment,
        "data_hash": comparison.data,
        "verdict": asdict(verdict_of(comparison)),
        "fingerprint": comparison.fingerprint,
        "support": comparison.newest.support,
        "versions": comparison.newest.versions,
        "config": comparison.config,
        "reference": comparison.reference_name,
        "differs_from_the_one_above": {
            key: {"there": there, "here": here} for key, (there, here) in comparison.differs.items()
        },
        "arms": [
            {
                "arm": row.arm,
                "statuses": dict(row.statuses),
                "seeds": sorted(run.seed for run in row.counted),
                "figures": {name: vars(known) for name, known in row.figures.items()},
                "against_reference": {name: vars(known) for name, known in row.against.items()},
                "timing": _timing(row),
                "loss_verdict": asdict(losses[row.arm]) if row.arm in losses else None,
                "target": asdict(reaches[row.arm]) if row.arm in reaches else None,
                "memory": row.memory,
                "folders": [run.folder for run in row.runs],
            }
            for row in comparison.rows
        ],
        "reading": reading(comparison),
        "warnings": [{"code": code, "text": text} for code, text in warnings_of(comparison)],
    }
