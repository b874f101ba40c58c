"""What a job of a sweep costs beside its training, and what W&B costs beside a step. In alternation.

    python scripts/bench_sweep.py [rounds=9]

A job's cost is the wall time of its process less that of a process that imports torch and
torchvision and nothing else. A log point's cost is a call of the offline mirror with a run's
usual values, as a share of the steps of 20 ms between two log points at the default interval.
"""

import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from precision_lab.config import compose
from precision_lab.recorder import METRICS
from precision_lab.sweep.child import Order
from precision_lab.sweep.launch import CHILD
from precision_lab.tracking import Mirror

BARE = [sys.executable, "-c", "import torch, torchvision"]
STEP_MS = 20


def seconds(command: list[str], stdin: bytes = b"") -> float:
    start = time.perf_counter()
    # the job's stdin stays open, as the sweep holds it
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.stdin.write(stdin)
    process.stdin.flush()
    if process.wait():
        sys.exit(f"{command} failed")
    return time.perf_counter() - start


def job(mode: str, outputs: Path) -> bytes:
    asked = compose(
        ["experiment=smoke", "precision=bf16", "rerun=all", f"wandb.mode={mode}", f"paths.outputs={outputs}"]
    )
    return pickle.dumps(Order(asked, sys.path, ["train.py"]))


def cost_of_jobs(rounds: int, outputs: Path) -> None:
    orders = {mode: job(mode, outputs / mode) for mode in ("disabled", "offline")}
    bare, times = [], {mode: [] for mode in orders}
    for _ in range(rounds):
        bare.append(seconds(BARE))
        for mode, order in orders.items():
            times[mode].append(seconds(CHILD, order))
    print(f"importing torch and torchvision: {statistics.median(bare):.2f} s (median of {rounds})")
    for mode, own in times.items():
        extra = sorted(a - b for a, b in zip(own, bare, strict=True))
        print(f"a job beyond that, W&B {mode}: {statistics.median(extra):.2f} s ({extra[0]:.2f} to {extra[-1]:.2f})")


def cost_of_logging(outputs: Path) -> None:
    asked = compose(["wandb.mode=offline"])
    mirror = Mirror(asked.wandb, outputs, name="bench", job_type="benchmark")
    values = {name: 0.5 for name in METRICS if name.startswith(("train/", "amp/", "perf/step_ms_p50"))}
    times = []
    for point in range(200):
        time.sleep(0.005)  # as between two log points, W&B has time for what it does beside
        start = time.perf_counter()
        mirror.log({**values, "train/step": point})
        times.append((time.perf_counter() - start) * 1e3)
    mirror.finish("completed", None, {})
    one, steps = statistics.median(times), asked.trainer.log_every
    share = one / (steps * STEP_MS)
    print(f"a log point to W&B offline: {one:.2f} ms (median of {len(times)})")
    print(f"that is {share:.2%} of the {steps} steps of {STEP_MS} ms between two of them")


def main(words: list[str]) -> None:
    rounds = int(dict(word.split("=") for word in words).get("rounds", 9))
    with tempfile.TemporaryDirectory() as folder:
        cost_of_jobs(rounds, Path(folder))
        cost_of_logging(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
