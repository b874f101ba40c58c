"""The benchmark behind a comparison's speed ratios: how it timed the arms, and the command that times them again."""

import json

from precision_lab.columns import kind_of_step
from precision_lab.report.compare import Comparison
from precision_lab.report.read import plain
from precision_lab.report.timing import sentences
from precision_lab.report.verdict import command_line, experiment_overrides


def how_timed(comparison: Comparison) -> str:
    """How long and how exactly; "" where no ratio of the comparison is of a benchmark."""
    benchmark = comparison.benchmark
    if not benchmark or not any(row.timing for row in comparison.rows):
        return ""
    floors = "; ".join(f"{kind_of_step(*kind)} {ratio}" for kind, ratio in benchmark.floor.items())
    return plain(
        f"Timed in alternation by scripts/benchmark.py. {sentences(benchmark)[0]} Noise floor, {benchmark.reference} "
        f"beside itself with a 99 % interval, which has to hold 1: {floors}."
    )


def benchmark_command(comparison: Comparison) -> str:
    """The command of its newest benchmark, with every setting as it was; "" where there is none."""
    if not comparison.benchmark:
        return ""
    settings = comparison.benchmark["settings"].items()
    own = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings]
    return plain(command_line("scripts/benchmark.py", [*experiment_overrides(comparison), *own]))
