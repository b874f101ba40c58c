"""What a job of a sweep costs beside its training, and what W&B costs beside a step. In alternation.

    python scripts/bench_sweep.py [rounds=9]

A job's cost is the wall time of its process less that of a process that imports torch and
torchvision and nothing else. A log point's cost is a ratio of blocks of steps, in pairs; the 95 %
interval of its mean bootstraps the pairs.
"""

import pickle
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from precision_lab.config import compose
from precision_lab.entry import exit_code
from precision_lab.errors import InputError
from precision_lab.recorder import METRICS
from precision_lab.sweep.child import Order
from precision_lab.sweep.launch import CHILD
from precision_lab.tracking import mirror as tracking
from precision_lab.tracking.mirror import Mirror

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


def cost_of_logging(pairs: int, outputs: Path) -> None:
    """Blocks of the steps between two log points, with and without one, in alternation; the waking of W&B included."""
    import torch

    torch.set_num_threads(1)
    asked = compose(["wandb.mode=offline"])
    tracking.SEND_EVERY_S *= 2  # half of the time goes to blocks without a log point
    mirror = Mirror(asked.wandb, outputs, name="bench", job_type="benchmark")
    values = {name: 0.5 for name in METRICS if name.startswith(("train/", "amp/", "perf/step_ms_p50"))}
    operand = torch.randn(700, 700)
    steps = asked.trainer.log_every

    def block(matmuls: int, log: bool) -> float:
        start = time.perf_counter()
        for _ in range(matmuls):
            operand @ operand
        if log:
            mirror.log({**values, "train/step": 0})
        return time.perf_counter() - start

    block(50, log=True)
    matmuls = round(steps * STEP_MS / 1e3 / (block(50, log=False) / 50))
    ratios = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {log: block(matmuls, log) for log in order}
        ratios.append(times[True] / times[False])
    mirror.finish("completed", None, {})
    resampled = sorted(statistics.mean(random.choices(ratios, k=pairs)) for _ in range(2000))
    print(f"{steps} steps of {STEP_MS} ms with a log point to W&B offline, over as many without:")
    print(f"ratio {statistics.mean(ratios):.4f} [{resampled[49]:.4f}, {resampled[1949]:.4f}], mean of {pairs} pairs")


def main(words: list[str]) -> int:
    given = " ".join(words) or "rounds=9"
    rounds = re.fullmatch(r"rounds=([1-9]\d*)", given)
    if not rounds:
        raise InputError(f"{given} is not valid; write rounds=N.")
    with tempfile.TemporaryDirectory() as folder:
        cost_of_jobs(int(rounds.group(1)), Path(folder))
        cost_of_logging(100, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
