"""Train one experiment in three precisions with six seeds each, time the arms in alternation, and say what came out.

python scripts/demo.py [any override of train.py: experiment=lesson precision=fp32,bf16 seed=0] [budget_s=30]

What is finished already is not run again. On CUDA the model is large enough for the units to matter. Ends with the
verdict on this machine and the path of a page that shows it all.
"""

import runpy
import sys
from pathlib import Path

from precision_lab.arms import group_of, key_of
from precision_lab.config import ROOT, compose
from precision_lab.entry import exit_code
from precision_lab.errors import InputError
from precision_lab.folders import sweep_folder
from precision_lab.identity import experiment_signature
from precision_lab.report.benchmarks import FILE, load
from precision_lab.settings import BenchmarkConfig, own_settings

PLACES = ("experiment", "name", "paths.")  # the overrides that decide where a sweep lies
OF_A_RUN = ("precision", "seed", "check", "rerun", "on_error", "on_unsupported")  # and not of a benchmark


def main(words: list[str]) -> int:
    if flags := [word for word in words if word.startswith("-")]:
        raise InputError(f"{flags[0]} is no override; the demo takes those of train.py, such as seed=0 or name=mine.")
    usual = {"experiment": "demo", "precision": "fp32,bf16,fp16", "seed": "0,1,2,3,4,5"}
    given = {key_of(word): word.partition("=")[2] for word in words}
    if "experiment" not in given and _has_cuda():
        usual["experiment"] = "demo_cuda"
    budget = f"budget_s={given.get('budget_s', 30)}"
    own_settings([budget], BenchmarkConfig, "benchmark.yaml")  # refused before anything is trained
    words = [word for word in words if not word.startswith("budget_s=")]
    overrides = [f"{key}={value}" for key, value in usual.items() if key not in given] + words
    folder = sweep_folder(compose([word for word in overrides if word.lstrip("+").startswith(PLACES)]))
    swept = _run("train.py", "-m", *overrides)
    if swept not in (0, 1) or not folder.is_dir():  # 1: a job failed, and the others are there to compare
        return swept
    print(flush=True)
    timed = _time(
        folder, [word for word in overrides if group_of(word) not in OF_A_RUN], (usual | given)["precision"], budget
    )
    compared = _run("scripts/compare.py", str(folder), "--html", str(folder / "report.html"))
    return swept or timed or compared


def _time(folder: Path, experiment: list[str], arms: str, budget: str) -> int:
    """Time the arms in alternation, once for an experiment; a sweep over other things than arms is left to the user."""
    if "," not in arms or any("," in word.partition("=")[2] and "[" not in word for word in experiment):
        return 0
    signature = experiment_signature(compose(experiment))
    known = (load(str(file.parent))[0] for file in folder.glob(f"benchmarks/*/{FILE}"))
    if any(one and one.experiment == signature and set(arms.split(",")) <= set(one["arms"]) for one in known):
        return 0
    timed = _run("scripts/benchmark.py", *experiment, f"arms={arms}", budget)
    print(flush=True)
    return timed


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
