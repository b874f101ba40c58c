"""A comparison as a W&B run of job type compare: a row an arm as a table, charts as pictures, and the page.

The rows are those of comparison.csv, the charts those of the page. Local files are complete without W&B, which stops
nothing.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from precision_lab.config import Config
from precision_lab.folders import outputs, outputs_above
from precision_lab.recorder import storable, write_whole
from precision_lab.redaction import redact
from precision_lab.report import drawing, files, render
from precision_lab.report.compare import Comparison
from precision_lab.report.page import Section
from precision_lab.report.read import Found
from precision_lab.report.warnings import warnings_of
from precision_lab.tracking.mirror import Mirror
from precision_lab.tracking.words import without_secrets

TABLE = "arms"  # by which a saved view shows it
UPLOAD_S = 60  # that the pictures and the page may take


def hand_over(
    comparisons: list[Comparison],
    found: Found,
    sections: list[Section],
    page: str,
    asked: Config,
    secrets: list[str],
) -> str:
    """Hand all of it over, and say where W&B has it: "" where it failed, which a warning has told.

    `sections` and `page` are of these comparisons; `asked` is the default config, for mode, project and outputs.
    """
    clean = partial(redact, secrets=secrets)
    folder = _beside_the_runs(comparisons, asked)
    subject = _subject(clean(list(dict.fromkeys(one.name for one in comparisons))))
    arms = list(dict.fromkeys(row.arm for one in comparisons for row in one.rows))
    devices = dict.fromkeys(one.fingerprint.get("model") for one in comparisons)
    config = {
        "job_type": "compare",
        "sources": found.sources,
        "where": found.where,
        "reference": comparisons[0].reference_name,
        "arms": arms,
        "device_names": list(devices),
    }
    mirror = Mirror(
        without_secrets(asked.wandb, secrets),
        folder,
        upload_s=UPLOAD_S,
        complete="the comparison is complete",
        name=f"compare_{subject}",
        job_type="compare",
        group="compare",
        tags=clean(arms),
        config=clean(config),
    )
    header, rows = files.as_table(comparisons)
    mirror.table(TABLE, clean(header), clean(storable(rows)))
    with tempfile.TemporaryDirectory() as place:
        _hand_over_pictures(mirror, sections, Path(place), clean)
        mirror.page("page", clean(page))
        write_whole(report := Path(place) / "report.html", clean(page))
        mirror.artifact(f"report_{subject}", "report", report, stays=False)
    mirror.finish("completed", None, clean(_summary(comparisons, found)))
    if mirror.state == "degraded":
        return ""
    return mirror.url or f"{folder / 'wandb'}, run {mirror.id}"


def _beside_the_runs(comparisons: list[Comparison], asked: Config) -> Path:
    here = (run.folder for one in comparisons for run in one.runs if os.path.isdir(run.folder))
    first = next(here, None)
    return outputs_above(Path(first)) if first else outputs(asked)


def _subject(names: list[str]) -> str:
    """Of letters that an id may have; a secret in a name is to be taken out before, or half of it might stay."""
    first = re.sub(r"[^a-z0-9.-]+", "-", names[0].lower())[:40].strip("-")
    return first + (f"_and_{len(names) - 1}_more" if len(names) > 1 else "")


def _hand_over_pictures(mirror: Mirror, sections: list[Section], folder: Path, clean: Callable[[Any], Any]) -> None:
    for n, section in enumerate(sections, 1):
        for chart in section.charts:
            if mirror.state == "degraded":
                return
            keys = [replace(key, label=clean(key.label)) for key in chart.keys or chart.arms]
            title, below = clean([chart.heading, f"{section.title} on {section.hardware}"])
            path = folder / f"{n}_{chart.name}.png"
            path.write_bytes(drawing.picture(clean(chart.spec), keys, title, below))
            mirror.picture(f"charts/{path.stem}", path, clean(chart.caption))


def _summary(comparisons: list[Comparison], found: Found) -> dict[str, str | int]:
    """A verdict each, in the order of the page, and counts."""
    verdicts = {f"verdict/{n}": render.headline(one) for n, one in enumerate(comparisons[: render.SHOWN], 1)}
    return verdicts | {
        "comparisons": len(comparisons),
        "runs": sum(len(one.runs) for one in comparisons),
        "left_out": len(found.skipped),
        "warnings": sum(len(warnings_of(one)) for one in comparisons),
    }
