"""The W&B run of a benchmark, from what its benchmark.json tells: as it was made, or later. No torch.

Ratios above 1: faster. One that no noise floor vouches for is in the table, and no figure of the run.
"""

import json
import re
from pathlib import Path
from typing import Any

from precision_lab import columns, open_sets
from precision_lab.config import WandbConfig
from precision_lab.tracking.of_folder import FolderMirror
from precision_lab.tracking.words import words_of

HEADER = ["arm", "kind", "step_ms", "speed_ratio", "low", "high", "verdict", "pairs"]
LONGEST = 900_000  # characters of the record: of a value W&B takes less than a megabyte
DAMAGED = (KeyError, TypeError, AttributeError, ValueError)  # what a benchmark.json that is none raises


class BenchmarkMirror(FolderMirror):
    """Holds the whole record, its columns as a table, and the ratios that are trusted."""

    record = held = "benchmark.json"

    def __init__(
        self,
        folder: Path,
        outputs: Path,
        told: dict[str, Any],
        asked: WandbConfig,
        slack: float = 1,
        settings: dict[str, Any] | None = None,
    ):
        """`told` is what benchmark.json holds; one of DAMAGED, with nothing begun, where that is no benchmark."""
        name, words, rows = _name(told), _words(told), rows_of(told)
        self.figures(told)
        super().__init__(folder, outputs, asked, slack, name=name, job_type="benchmark", settings=settings, **words)
        self.mirror.table("columns", HEADER, rows)

    def figures(self, told: dict[str, Any]) -> dict[str, Any]:
        """`benchmark/speed_ratio_bf16` and the like, with the ends of their intervals."""
        made: dict[str, Any] = {"benchmark/seconds": told["seconds"], "benchmark/stopped_by": told["stopped_by"]}
        for column in told["columns"]:
            if column["ratio"] and not column["again"] and _is_trusted(column, told):
                name = _free(f"benchmark/speed_ratio{_kind(column)}_{_word(column['arm'])}", made)
                ratio = column["ratio"]
                made |= {name: ratio["value"], f"{name}_low": ratio["low"], f"{name}_high": ratio["high"]}
        return made

    def shortened(self, told: dict[str, Any]) -> dict[str, Any]:
        """As it is, or with the times of every so many sittings; `times_of_every` tells, ratios are of all."""
        every = -(-len(json.dumps(told, separators=(",", ":"))) // LONGEST)
        if every == 1:
            return told
        kept = [one | {"seconds_a_step": one["seconds_a_step"][::every]} for one in told["columns"]]
        return told | {"columns": kept, "times_of_every": every}


def rows_of(told: dict[str, Any]) -> list[list[Any]]:
    """A row for each column, under HEADER: the reference arm first, then its second copy."""
    reference = told["reference"]
    order = [reference, columns.again(reference), *told["arms"]]
    rows = []
    for column in told["columns"]:
        arm = columns.again(column["arm"]) if column["again"] else column["arm"]
        ratio = column["ratio"] or dict.fromkeys(("value", "low", "high", "pairs"))
        kind = columns.kind_of_step(column["compiled"], column["with_data"])
        ends = [ratio[key] for key in ("value", "low", "high")]
        rows.append([arm, kind, column["step_ms"], *ends, columns.verdict(column, told["columns"]), ratio["pairs"]])
    return sorted(rows, key=lambda row: order.index(row[0]))


def _words(told: dict[str, Any]) -> dict[str, Any]:
    arms, device = list(told["arms"]), told["fingerprint"]["device"]
    environment = {"git": {"sha": None}} | told
    words = words_of(told["config"], ", ".join(arms), told["experiment_signature"], environment, device)
    about = {"arms": arms, "reference": told["reference"], "benchmark": told["settings"]}
    tags = [*arms, device, *(told["config"].get("tags") or [])]
    return words | {"tags": tags, "config": words["config"] | about}


def _name(told: dict[str, Any]) -> str:
    config = told["config"]
    parts = [open_sets.label(config["model"]), open_sets.label(config["dataset"]), told["fingerprint"]["device"]]
    clean = (re.sub(r"[^a-z0-9.-]+", "-", part.lower())[:40] for part in parts)
    return "_".join(["benchmark", *clean, told["experiment_signature"]])


def _is_trusted(column: dict[str, Any], told: dict[str, Any]) -> bool:
    return columns.trusted(told["columns"], column["compiled"], column["with_data"])


def _kind(column: dict[str, Any]) -> str:
    return "_compiled" * column["compiled"] + "_end_to_end" * column["with_data"]


def _word(arm: str) -> str:
    """A name that W&B sorts and filters by has letters, digits and underscores."""
    return re.sub(r"\W+", "_", arm, flags=re.ASCII).strip("_")


def _free(name: str, taken: dict[str, Any]) -> str:
    while name in taken:  # two labels that differ in their marks alone
        name += "_"
    return name
