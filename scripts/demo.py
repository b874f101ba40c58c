"""Train the same experiment in several precisions, one process each, and print a row for each.

python scripts/demo.py [experiment=demo] [precision=fp32,bf16,fp16] [any other override of train.py]
"""

import json
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
ROW = "{:<14} {:<10} {:>9} {:>9} {:>9} {:>9} {:>10}"
HEADER = ROW.format("precision", "status", "val loss", "in fp32", "accuracy", "ms a step", "saved MiB")
CAVEAT = """\
val loss in the arm's precision and, on the same weights, in fp32; ms a step: median;
saved MiB: activations kept for backward. Timed one after the other, so a machine that
warmed up or got busy in between shows in the times: they are no comparison of speed."""


def main(words: list[str]) -> int:
    asked = {"experiment": "demo", "precision": "fp32,bf16,fp16"}
    asked |= {key: value for key, _, value in (word.partition("=") for word in words)}
    precisions = asked.pop("precision").split(",")
    overrides = [f"{key}={value}" for key, value in asked.items()]
    worst = 0
    for number, precision in enumerate(precisions):
        # a fresh process each: backend flags and memory peaks would leak from one to the next
        command = [sys.executable, str(TRAIN), f"precision={precision}", *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        if number == 0 and lines:
            print(f"{lines[0]}\n\n{HEADER}")
        named = [line.rsplit(" -> ", 1)[1] for line in lines if " -> " in line]
        print(row(precision, Path(named[0])) if named and done.returncode == 0 else "\n".join(lines), flush=True)
        worst = max(worst, done.returncode)
    print(f"\n{CAVEAT}")
    return worst


def row(precision: str, folder: Path) -> str:
    """The run's figures, read from its result.json."""
    result = json.loads((folder / "result.json").read_text())
    keys = ("val_loss", "val_loss_fp32", "val_accuracy", "perf_step_ms_p50", "mem_saved_activations_mib")
    figures = [result["summary"].get(f"final/{key}") for key in keys]
    shown = ["-" if figure is None else f"{figure:.4g}" for figure in figures]
    return ROW.format(precision, result["status"], *shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
