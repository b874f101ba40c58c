"""A benchmark as a terminal shows it: how it stands while it runs, its tables, and what they say in sentences."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from precision_lab.columns import again, kind_of_step, verdict
from precision_lab.ratios import MARGIN, Ratio
from precision_lab.report.benchmarks import LAUNCH_BOUND, Benchmark
from precision_lab.report.read import plain
from precision_lab.report.reading import joined, machine
from precision_lab.report.render import print_tables
from precision_lab.report.warnings import warnings_of_benchmark

WAITS = 0.02  # share of a step that data takes, below which it is not worth a sentence
# What the verdict column may say of a ratio.
LEGEND = (
    f"faster, slower: the whole 95 % interval lies outside 1 +- {MARGIN:.1%}; no practical difference: inside; else "
    "not resolved. noise floor: the reference arm beside itself, with a 99 % interval, which has to hold 1."
)
_STOPPED = {
    "width": "ended when every interval was within {half_width:.2%} of its ratio",
    "budget": "ended with its time budget of {budget_s:.0f} s",
    "interrupted": "interrupted",
}


@contextmanager
def standing(budget_s: float) -> Iterator[Callable[[Any], None]]:
    """Yield what is told after each sitting: on a terminal it says how the ratios stand, elsewhere nothing."""
    if sys.stdout is None or not sys.stdout.isatty():
        yield lambda measured: None
        return
    console, began = Console(), time.monotonic()
    with console.status("building and warming up") as status:

        def told(measured: Any) -> None:  # a Measured, whose module brings torch
            compiled, reference = measured.columns[0].compiled, measured.reference
            alone = [c for c in measured.columns if (c.compiled, c.with_data) == (compiled, False)]
            shown = ", ".join(f"{c.arm} {measured.ratio(c)}" for c in alone if c.arm != reference)
            status.update(f"{time.monotonic() - began:.0f} of at most {budget_s:.0f} s: {shown}")

        yield told


def show(benchmark: Benchmark, console: Console) -> None:
    """Print the tables, what they say, and under which conditions."""
    console.print(Text(plain(f"benchmark of {benchmark.name}"), style="bold"))
    for caption, header, rows in tables(benchmark):
        console.print(Text(f"\n{caption}"))
        print_tables((header, rows), console)
    console.print(Text("\n" + "\n".join(sentences(benchmark))))
    if cautions := [f"! {text}" for _, text in warnings_of_benchmark(benchmark)]:
        console.print(Text("\n" + "\n".join(cautions), style="yellow"))
    console.print(Text(f"\n{LEGEND}", style="dim"))


def tables(benchmark: Benchmark) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(caption, header, rows), a table for each kind of step that was timed."""
    captions = {
        (False, False): "computing alone: batches stand ready on the device",
        (False, True): "end to end, with the data loader",
        (True, False): "compiled, computing alone",
        (True, True): "compiled, end to end",
    }
    order = [benchmark.reference, again(benchmark.reference), *benchmark["arms"]]
    for kind, caption in captions.items():
        compiled, with_data = kind
        columns = [one for one in benchmark["columns"] if (one["compiled"], one["with_data"]) == kind]
        if not columns:
            continue
        header = ["arm", "ms/step (quartiles)", "speed ratio", "verdict"]
        rows = []
        for one in columns:
            low, median, high = (f"{one[key]:.3g}" for key in ("step_ms_p25", "step_ms", "step_ms_p75"))
            ratio = Ratio(**one["ratio"]) if one["ratio"] else None
            name = again(one["arm"]) if one["again"] else one["arm"]
            told = [str(ratio) if ratio else "1", verdict(one, benchmark["columns"])]
            rows.append([name, f"{median} ({low} to {high})", *told])
        rows.sort(key=lambda row: order.index(row[0]))
        yield caption, header, rows


def sentences(benchmark: Benchmark) -> list[str]:
    """What was measured and how, and what it means."""
    pairs = next((one["ratio"]["pairs"] for one in benchmark["columns"] if one["ratio"]), 0)
    steps = sorted({one["steps_of_a_block"] for one in benchmark["columns"]})
    shown = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    how = "in processes that took turns" if benchmark["in_processes"] else "in one process"
    why = _STOPPED[benchmark["stopped_by"]].format(**benchmark["settings"])
    if benchmark["stopped_by"] == "budget" and benchmark["seconds"] > 1.5 * benchmark["settings"]["budget_s"]:
        why += ", which the fewest sittings that tell anything did not fit into"
    told = [
        f"On this {machine(benchmark.fingerprint)}: {pairs} pairs of blocks of {shown} steps in "
        f"{benchmark['sittings']} sittings {how}, {benchmark['seconds']:.0f} s; {why}."
    ]
    further = (_unresolved, _waits, _compiled, _launch_bound, _energy)
    told += [sentence for one in further if (sentence := one(benchmark))]
    without = {arm: told_of["without"] for arm, told_of in benchmark["arms"].items()}
    told += [f"{arm} was not timed: {why}." for arm, why in without.items() if why]
    return told


def _unresolved(benchmark: Benchmark) -> str:
    open_ = [(one, Ratio(**one["ratio"])) for one in benchmark["columns"] if one["ratio"] and not one["again"]]
    needed = [f"{_named(one)} about {ratio.pairs_needed:,}" for one, ratio in open_ if ratio.word == "not resolved"]
    return f"To be resolved at this spread, {joined(needed)} pairs would be needed: raise budget_s." if needed else ""


def _named(column: dict[str, Any]) -> str:
    return f"{column['arm']} {kind_of_step(column['compiled'], column['with_data'])}"


def _compiled(benchmark: Benchmark) -> str:
    took = {arm: told["compile_s"] for arm, told in benchmark["arms"].items() if told["compile_s"] is not None}
    if not took:
        return ""
    listed = joined([f"{seconds:.1f} s for {arm}" for arm, seconds in took.items()])
    columns = {arm: benchmark.column(arm, compiled=True) for arm in took}
    gains = [
        f"{arm} {Ratio(**column['over_eager'])}" for arm, column in columns.items() if column and column["over_eager"]
    ]
    speed = f" Its steps ran at these multiples of the eager speed: {joined(gains)}." if gains else ""
    return f"The first compilation took {listed}, in the order of this process and with caches as found.{speed}"


def _waits(benchmark: Benchmark) -> str:
    shares = {arm: told["data_share"] for arm, told in benchmark["arms"].items() if told["data_share"]}
    listed = [
        f"{share['value']:.0%} [{share['low']:.0%}, {share['high']:.0%}] of {arm}'s step"
        for arm, share in shares.items()
        if share["low"] >= WAITS
    ]
    return f"Loading data takes {joined(listed)}, which no precision makes faster." if listed else ""


def _launch_bound(benchmark: Benchmark) -> str:
    shares = {
        one["arm"]: one["busy_share"]
        for one in benchmark["columns"]
        if one["busy_share"] is not None and one["compiled"] == benchmark.compiled
    }
    if not shares:
        return ""
    listed = joined([f"{share:.0%} of {arm}'s step" for arm, share in shares.items()])
    bound = [arm for arm, share in shares.items() if share < LAUNCH_BOUND]
    why = (
        f" {joined(bound)} {'is' if len(bound) == 1 else 'are'} launch-bound: the GPU waits for the host, and faster "
        "kernels gain little; try a larger trainer.batch_size or device.compile=true."
        if bound
        else ""
    )
    return f"Kernels run in {listed}.{why}"


def _energy(benchmark: Benchmark) -> str:
    windows = {arm: told["joules_per_sample"] for arm, told in benchmark["arms"].items() if told["joules_per_sample"]}
    if not windows:
        return f"Energy: {benchmark['energy']}."
    listed = [f"{fmean(one):.3g} ({min(one):.3g} to {max(one):.3g}) for {arm}" for arm, one in windows.items()]
    return f"Energy, in J a sample by windows: {joined(listed)}."
