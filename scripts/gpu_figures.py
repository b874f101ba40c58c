"""Speed, memory and launch-bound share of two usual workloads on this GPU, kept as JSON. Some five minutes.

python scripts/gpu_figures.py [into=docs/results] [arms=fp32,tf32,bf16,fp16] [budget_s=45] [overrides of train.py]

Runs scripts/benchmark.py and a short sweep for each of them, and gathers what these leave behind.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from precision_lab.config import ROOT
from precision_lab.entry import exit_code
from precision_lab.errors import InputError
from precision_lab.recorder import write_whole
from precision_lab.report.benchmarks import LAUNCH_BOUND
from precision_lab.report.compare import Comparison, Row, compare
from precision_lab.report.read import read

WORKLOADS = ("gpu_resnet50", "gpu_gpt")
OWN = {"into": str(ROOT / "docs" / "results"), "arms": "fp32,tf32,bf16,fp16", "budget_s": "45"}


def main(words: list[str]) -> int:
    own = OWN | {key: value for key, _, value in (word.partition("=") for word in words) if key in OWN}
    own["arms"] = own["arms"].removeprefix("[").removesuffix("]") if own["arms"].startswith("[") else own["arms"]
    others = [word for word in words if word.partition("=")[0] not in OWN]
    with tempfile.TemporaryDirectory() as outputs:
        for workload in WORKLOADS:
            run = [f"experiment={workload}", f"paths.outputs={outputs}", "wandb.mode=disabled", *others]
            _do("scripts/benchmark.py", *run, f"arms={own['arms']}", f"budget_s={own['budget_s']}", "data=false")
            _do("train.py", "-m", *run, f"precision={own['arms']}")
        found = compare(read([Path(outputs)]))
    newest = found[0].newest
    made = {
        "hardware": found[0].fingerprint,
        "versions": newest.versions,
        "git": newest.git,
        "workloads": {one.name: _figures(one) for one in found},
    }
    into = Path(own["into"])
    into.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", str(found[0].fingerprint["model"]).lower()).strip("-")
    write_whole(into / f"{name}.json", json.dumps(made, indent=2) + "\n")
    print(f"written: {into / f'{name}.json'}")
    return 0


def _do(script: str, *words: str) -> None:
    """Each in a process of its own, which a GPU's memory is given back by."""
    done = subprocess.run([sys.executable, str(ROOT / script), *words])
    if done.returncode:
        raise InputError(f"{script} ended with exit code {done.returncode}; nothing was written.")


def _figures(comparison: Comparison) -> dict[str, Any]:
    benchmark = comparison.benchmark
    return {
        "command": f"python scripts/benchmark.py experiment={comparison.name} arms=[{','.join(benchmark['arms'])}]",
        "reference": benchmark.reference,
        "noise_floor": asdict(benchmark.floor[benchmark.compiled, False]),
        "stopped_by": benchmark["stopped_by"],
        "conditions": benchmark["conditions"],
        "arms": {row.arm: _arm(comparison, row) for row in comparison.rows},
    }


def _arm(comparison: Comparison, row: Row) -> dict[str, Any]:
    benchmark = comparison.benchmark
    column, ratio = benchmark.column(row.arm) or {}, row.timing and row.timing.ratio
    busy = column.get("busy_share")
    return {
        "step_ms": column.get("step_ms"),
        "speed_ratio": ratio and asdict(ratio) | {"word": ratio.word},
        "kernel_busy_share": busy,
        "launch_bound": None if busy is None else busy < LAUNCH_BOUND,
        "joules_per_sample": benchmark["arms"].get(row.arm, {}).get("joules_per_sample"),
        "statuses": dict(row.statuses),
        "peak_allocated_gib": row.figures["peak_allocated_gib"].mean if "peak_allocated_gib" in row.figures else None,
        "memory": row.memory,
    }


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
