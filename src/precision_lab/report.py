"""Runs side by side: one row an arm, for runs of one experiment on one kind of hardware. No torch.

Reads result.json and nothing else. Times are of runs one after the other, and no comparison of speed.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from precision_lab.folders import read_json

COLUMNS = ("arm", "runs", "val loss in fp32", "sd", "accuracy", "ms/step", "saved MiB")
NEEDED = {"config": dict, "fingerprint": dict, "summary": dict, "arm": str, "experiment_signature": str, "status": str}
CAVEAT = "Times are medians of runs one after the other: no comparison of speed on a machine that drifts or is shared."


def results(folders: list[Path]) -> list[dict[str, Any]]:
    """Every readable result below the folders, earlier attempts of a job left out."""
    paths = {
        path.resolve()
        for folder in folders
        for path in folder.rglob("result.json")
        if "attempts" not in path.relative_to(folder).parts
    }
    found = [read_json(path) for path in sorted(paths)]
    return [result for result in found if all(isinstance(result.get(key), kind) for key, kind in NEEDED.items())]


def tables(found: list[dict[str, Any]]) -> list[Table]:
    """A table for each experiment signature and hardware fingerprint."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for result in found:
        key = (result["experiment_signature"], tuple(sorted(result["fingerprint"].items())))
        groups.setdefault(key, []).append(result)
    return [_table(group) for group in groups.values()]


def _table(group: list[dict[str, Any]]) -> Table:
    first = group[0]
    machine, config = first["fingerprint"], first["config"]
    title = f"{config.get('name') or 'unnamed'} ({first['experiment_signature']}) on {machine.get('model')}"
    table = Table(box=None, pad_edge=False, title=Text(title), title_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("arm", "runs") else "right")
    arms: dict[str, list[dict[str, Any]]] = {}
    for result in group:
        arms.setdefault(result["arm"], []).append(result)
    for arm, runs in sorted(arms.items()):
        table.add_row(Text(arm), *_cells(runs))
    return table


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    statuses = Counter(run["status"] for run in runs)
    completed = [run["summary"] for run in runs if run["status"] == "completed"]

    def figure(of: Callable[[list[float]], float], name: str, at_least: int = 1) -> str:
        values = [summary[f"final/{name}"] for summary in completed if summary.get(f"final/{name}") is not None]
        return f"{of(values):.4g}" if len(values) >= at_least else "-"

    return [
        ", ".join(f"{number} {status}" for status, number in statuses.items()),
        figure(mean, "val_loss_fp32"),
        figure(stdev, "val_loss_fp32", at_least=2),
        figure(mean, "val_accuracy"),
        figure(median, "perf_step_ms_p50"),
        figure(mean, "mem_saved_activations_mib"),
    ]
