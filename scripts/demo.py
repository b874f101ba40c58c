"""Train one experiment in three precisions with three seeds each, and put the arms side by side.

python scripts/demo.py [any override of train.py: experiment=lesson precision=fp32,bf16 seed=0]

What is finished already is not run again. On CUDA the model is large enough for the units to matter.
"""

import runpy
import sys

from precision_lab.config import ROOT, compose
from precision_lab.entry import exit_code
from precision_lab.errors import InputError
from precision_lab.folders import sweep_folder

PLACES = ("experiment", "name", "paths.")  # the overrides that decide where a sweep lies


def main(words: list[str]) -> int:
    if flags := [word for word in words if word.startswith("-")]:
        raise InputError(f"{flags[0]} is no override; the demo takes those of train.py, such as seed=0 or name=mine.")
    usual = {"experiment": "demo", "precision": "fp32,bf16,fp16", "seed": "0,1,2"}
    given = {word.lstrip("+").partition("=")[0] for word in words}
    if "experiment" not in given and _has_cuda():
        usual["experiment"] = "demo_cuda"
    overrides = [f"{key}={value}" for key, value in usual.items() if key not in given] + words
    folder = sweep_folder(compose([word for word in overrides if word.lstrip("+").startswith(PLACES)]))
    swept = _run("train.py", "-m", *overrides)
    if swept not in (0, 1) or not folder.is_dir():  # 1: a job failed, and the others are there to compare
        return swept
    print(flush=True)
    compared = _run("scripts/compare.py", str(folder), "--html", str(folder / "report.html"))
    return swept or compared


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(script: str, *words: str) -> int:
    """As if typed, but in this process: a signal reaches the sweep itself."""
    sys.argv = [str(ROOT / script), *words]
    sys.path[0] = str((ROOT / script).parent)  # the jobs of a sweep look there for the user's own modules
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
