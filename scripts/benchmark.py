"""Time training steps of several arms in alternation, and say which is faster here.

python scripts/benchmark.py model=cnn dataset=digits arms=[fp32,bf16] budget_s=60

Takes the overrides of train.py but for precision, and settings of its own, which are listed in conf/benchmark.yaml.
Compares with nothing else running on the device. Its result stands beside the runs of the same experiment, and
scripts/compare.py puts the two together.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from precision_lab.arms import arms_of
from precision_lab.config import as_values
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import Ended, InputError
from precision_lab.folders import benchmark_folder, outputs
from precision_lab.recorder import storable, write_whole
from precision_lab.redaction import redact, secrets_in
from precision_lab.report.benchmarks import FILE, load
from precision_lab.report.timing import show, standing
from precision_lab.settings import BenchmarkConfig, own_settings
from precision_lab.stops import handled_by
from precision_lab.tracking.of_benchmark import BenchmarkMirror
from precision_lab.tracking.words import without_secrets


def main(words: list[str]) -> int:
    settings, others = own_settings(words, BenchmarkConfig, "benchmark.yaml")
    asked = arms_of(settings.arms, others)
    if settings.reference not in asked:
        raise InputError(f"reference={settings.reference} is none of the arms, which are {', '.join(asked)}.")
    eager = next((label for label, one in asked.items() if one.precision.fp32_ops), None)
    if eager and settings.compiled:
        raise InputError(
            f"arms: {eager} keeps operations in float32, which no compiled model does; drop compiled=true."
        )
    from precision_lab.benchmark.measure import Measured, measure  # torch comes in here

    first = next(iter(asked.values()))
    folder = benchmark_folder(first)  # before anything is measured: it may not be possible to make one
    arrived: list[int] = []
    stood: list[Measured] = []  # as it stood after each sitting

    def interrupt(number: int, frame: object) -> None:
        arrived.append(number)
        if len(arrived) == 1 and not (stood and stood[-1].stopped_by):  # else what was timed is being written
            raise KeyboardInterrupt

    try:
        with handled_by(interrupt), standing(settings.budget_s) as show_standing:
            made = measure(asked, settings, lambda measured: (stood.append(measured), show_standing(measured)))
            secrets = secrets_in(os.environ, as_values(first), words)
            told = storable(redact(made, secrets))
            write_whole(folder / FILE, json.dumps(told, allow_nan=False) + "\n")
    except BaseException as error:
        remove_empty(folder, outputs(first))
        if isinstance(error, KeyboardInterrupt) and arrived:
            return 128 + arrived[0]
        if isinstance(error, Ended):  # a process of its own, which said why
            return error.code
        raise
    benchmark, damage = load(str(folder))
    if benchmark is None:
        raise RuntimeError(damage)
    show(benchmark, Console(highlight=False))
    print(f"\nwritten: {folder / FILE}", flush=True)
    interrupted = made["stopped_by"] == "interrupted"
    # after all that is timed
    mirror = BenchmarkMirror(folder, outputs(first), told, without_secrets(first.wandb, secrets))
    mirror.finish("interrupted" if interrupted else "completed", None)
    return 128 + arrived[0] if interrupted else 0


def remove_empty(folder: Path, root: Path) -> None:
    """The folder made for nothing, and those above it that are empty then, below `root`."""
    with suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
