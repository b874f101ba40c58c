"""What jobs of a sweep might do to each other, or do wrong."""

import json
import os
import random
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy
import torch
from mine import Line, line_data, regression

__all__ = ["line_data", "regression"]


class Case(Line):
    """Trains, diverges, asks for too much, refuses its argument, or takes its time, as it is told.

    While there is a file `killed_once`, the case "killed" removes it and kills its process.
    """

    def __init__(
        self,
        case: str = "good",
        seconds: float = 0.0,
        api_key: str = "",
        extra: dict | None = None,
        killed_once: str = "",
    ):
        if case == "oops":
            raise TypeError(f"no case {case!r} with the key {api_key!r} and {extra}")
        super().__init__()
        self.case, self.seconds, self.killed_once = case, seconds, Path(killed_once)

    def forward(self, x):
        time.sleep(self.seconds)
        if self.case == "killed" and self.killed_once.is_file():
            self.killed_once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "greedy":
            torch.empty(2**50)
        return super().forward(x) * (float("nan") if self.case == "bad" else 1.0)


def seen() -> dict:
    """The state of this process that a job before it may have left behind."""
    backends = torch.backends
    flags = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    ]
    return {
        "flags": [flag.fp32_precision for flag in (backends, *flags)] + [str(torch.get_default_dtype())],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "generators": [
            torch.get_rng_state().sum().item(),
            numpy.random.get_state()[1][:4].tolist(),
            random.getstate()[1][:4],
        ],
        "environment": os.environ.get("LEFT_BY_A_JOB"),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


class Leaky(Line):
    """Notes what it finds; with `leave` it then turns over all that a process shares."""

    def __init__(self, notes: str, leave: int):
        Path(notes).mkdir(exist_ok=True)
        (Path(notes) / f"{leave}-{os.getpid()}.json").write_text(json.dumps(seen()))
        super().__init__()
        self.leave = leave

    def forward(self, x):
        if self.leave:
            torch.backends.fp32_precision = "tf32"
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
            torch.manual_seed(999)
            numpy.random.seed(999)
            random.seed(999)
            os.environ["LEFT_BY_A_JOB"] = "yes"
            torch.ones(300 * 2**18)  # 300 MiB
        return super().forward(x)


class Spoiler(Line):
    """At its `step`-th training step it does something to the disk, once: what its `order` file says, which then goes.

    `fill PATH` writes there until the disk is full, `run PATH` starts a program and waits.
    """

    def __init__(self, order: str, step: int):
        super().__init__()
        self.order, self.step, self.seen = Path(order), step, 0

    def forward(self, x):
        self.seen += self.training
        if self.seen == self.step and self.training and self.order.exists():
            what, path = self.order.read_text().split()
            self.order.unlink()
            fill(Path(path)) if what == "fill" else subprocess.run([path], check=True)
        return super().forward(x)


def fill(path: Path) -> None:
    """Leave no byte of the disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**20)):
            pass
