"""Train the same experiment in several precisions, one process each, and print a line for each.

    python scripts/demo.py [experiment=demo] [precision=fp32,bf16,fp16] [any other override of train.py]

A precision that this device does not support is named and passed over.
"""

import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def main(words: list[str]) -> int:
    asked = {"experiment": "demo", "precision": "fp32,bf16,fp16"}
    asked |= dict(word.split("=", 1) for word in words)
    precisions = asked.pop("precision").split(",")
    worst = 0
    for precision in precisions:
        overrides = [f"precision={precision}", *(f"{key}={value}" for key, value in asked.items())]
        # a fresh process: backend flags and memory peaks would leak from one to the next
        worst = max(worst, subprocess.run([sys.executable, str(TRAIN), *overrides]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
