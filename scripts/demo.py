"""Train one experiment in three precisions with three seeds each, and put the arms side by side.

python scripts/demo.py [any override of train.py: experiment=lesson precision=fp32,bf16 seed=0]

What is finished already is not run again. On CUDA the model is large enough for the units to matter.
"""

import subprocess
import sys

import torch

from precision_lab.config import ROOT, compose
from precision_lab.entry import exit_code
from precision_lab.folders import sweep_folder

PLACES = ("experiment=", "name=", "paths.")  # the overrides that decide where a sweep lies


def main(words: list[str]) -> int:
    usual = {
        "experiment": "demo_cuda" if torch.cuda.is_available() else "demo",
        "precision": "fp32,bf16,fp16",
        "seed": "0,1,2",
    }
    given = {word.partition("=")[0] for word in words}
    overrides = [f"{key}={value}" for key, value in usual.items() if key not in given] + words
    folder = sweep_folder(compose([word for word in overrides if word.startswith(PLACES)]))
    swept = subprocess.run([sys.executable, ROOT / "train.py", "-m", *overrides]).returncode
    if swept in (0, 1):  # 1: a job failed, and the others are there to compare
        print(flush=True)
        compared = subprocess.run([sys.executable, ROOT / "scripts" / "compare.py", folder]).returncode
        return swept or compared
    return swept


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
