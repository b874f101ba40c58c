"""Benchmarks as scripts/benchmark.py left them (benchmark.json): read, matched with a comparison, and put in words."""

import math
import os
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from precision_lab import columns
from precision_lab.identity import counted_arm
from precision_lab.open_sets import label
from precision_lab.ratios import Ratio, ratio_of
from precision_lab.report.stored import lacking, object_in

FILE = "benchmark.json"
SCHEMA_VERSION = 1
STOPPED_BY = ("width", "budget", "interrupted")
LAUNCH_BOUND = 0.7  # share of a step below which kernels leave the GPU waiting for the host
BUSY = 0.15  # share of a machine's cores that others may keep busy
_NEEDED = {
    "schema": int, "experiment_signature": str, "data_hash": str, "fingerprint": dict, "host": str, "versions": dict,
    "finished": int | float, "reference": str, "stopped_by": str, "seconds": int | float, "sittings": int,
    "arms": dict, "columns": list, "conditions": dict, "config": dict, "support": dict, "settings": dict,
    "warm_up_capped": int, "in_processes": bool, "energy": str,
}  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """What a benchmark says of an arm beside the reference arm, timed in alternation. Ratios above 1: faster."""

    ratio: Ratio  # of computing alone, as the experiment's runs do: compiled, if these are
    end_to_end: Ratio | None = None  # with the data loader; None where that was not timed
    compiled: Ratio | None = None  # of both arms compiled beside an eager experiment, computing alone
    data_share: float | None = None  # of the arm's step that data takes and computing does not hide
    busy_share: float | None = None  # of the arm's step in which a kernel runs on the GPU
    joules_per_sample: float | None = None

    @property
    def felt(self) -> Ratio:
        """What a training run feels: with the data loader, where that was timed."""
        return self.end_to_end or self.ratio


class Benchmark:
    """One benchmark.json."""

    def __init__(self, folder: str, told: dict[str, Any]):
        self.folder, self.told = folder, told
        self.experiment, self.data = told["experiment_signature"], told["data_hash"]
        self.fingerprint: dict[str, Any] = told["fingerprint"]
        self.finished: float = told["finished"]
        self.reference: str = told["reference"]
        self.compiled: bool = told["config"]["device"]["compile"]  # of the runs that it stands beside
        self.name: str = told["name"] or f"{label(told['config']['model'])} on {label(told['config']['dataset'])}"

    def __getitem__(self, key: str) -> Any:
        return self.told[key]

    def ratio(
        self, arm: str, compiled: bool | None = None, with_data: bool = False, base: str | None = None
    ) -> Ratio | None:
        """The arm's ratio to the reference arm, or to another as `base`, by steps such as the runs' own."""
        column, other = self.column(arm, compiled, with_data), self.column(base or self.reference, compiled, with_data)
        if not column or not other or column is other:
            return None
        if column["ratio"] and other["ratio"] is None:
            return Ratio(**column["ratio"])
        sittings = zip(other["seconds_a_step"], column["seconds_a_step"], strict=True)
        logs = [[math.log(b / a) for b, a in zip(*both, strict=True)] for both in sittings]
        return ratio_of(logs) if sum(map(len, logs)) > 1 else None

    def column(self, arm: str, compiled: bool | None = None, with_data: bool = False) -> dict[str, Any] | None:
        """What was measured of one kind of step."""
        wanted = (arm, self.compiled if compiled is None else compiled, with_data, False)
        kinds = ("arm", "compiled", "with_data", "again")
        return next((one for one in self["columns"] if tuple(one[kind] for kind in kinds) == wanted), None)

    @cached_property
    def floor(self) -> dict[tuple[bool, bool], Ratio]:
        """(compiled, with data) -> the ratio of the reference arm to itself."""
        copies = [one for one in self["columns"] if one["again"] and one["ratio"]]
        return {(one["compiled"], one["with_data"]): Ratio(**one["ratio"]) for one in copies}

    def trusted(self, compiled: bool, with_data: bool) -> bool:
        """Whether the reference arm's ratio to itself holds 1 in steps of that kind."""
        return columns.trusted(self["columns"], compiled, with_data)

    @property
    def untrusted(self) -> dict[tuple[bool, bool], Ratio]:
        """The floors that leave 1 out."""
        return {kind: ratio for kind, ratio in self.floor.items() if not self.trusted(*kind)}

    def label_of(self, precision: dict[str, Any]) -> str | None:
        """The arm with that precision group."""
        wanted = counted_arm(precision)
        return next((label for label, arm in self["arms"].items() if counted_arm(arm["precision"]) == wanted), None)

    def timing_of(self, precision: dict[str, Any], reference: dict[str, Any]) -> Timing | None:
        """What it says of the arm; None where it did not time both, or a noise floor of such steps leaves 1 out."""
        label, base = self.label_of(precision), self.label_of(reference)
        if label is None or base is None:
            return None
        ratio, end_to_end = (self.ratio(label, with_data=data, base=base) for data in (False, True))
        floors = [(self.compiled, False)] + ([(self.compiled, True)] if end_to_end else [])
        if ratio is None or not all(self.trusted(*kind) for kind in floors):
            return None
        trusted = not self.compiled and self.trusted(True, False)
        compiled = self.ratio(label, compiled=True, base=base) if trusted else None
        arm, joules = self["arms"][label], self["arms"][label]["joules_per_sample"]
        share = arm["data_share"] and arm["data_share"]["value"]
        busy = self.column(label)["busy_share"]
        return Timing(ratio, end_to_end, compiled, share, busy, fmean(joules) if joules else None)

    def disturbances(self) -> list[str]:
        """Sentences on who else was on the machine, and on clocks that were held down."""
        start, end = self["conditions"]["start"], self["conditions"]["end"]
        states, told = (start, self["conditions"].get("during") or {}, end), []
        busy = max(one.get("busy_cores") or 0.0 for one in (start, end))
        if busy > BUSY * (start.get("cores") or 1):
            told.append(f"Others kept {busy:.1f} of {start['cores']} cores busy.")
        throttled = sorted({reason for one in states for reason in one.get("throttled_by") or ()})
        if throttled:
            told.append(f"The GPU's clocks were held down: {', '.join(throttled)}.")
        others = sorted({pid for one in states for pid in one.get("other_processes") or ()})
        if others:
            told.append(f"Other processes were on the GPU: {', '.join(map(str, others))}.")
        return told


def load(folder: str) -> tuple[Benchmark | None, str]:
    """(the benchmark in a folder, "") or (None, why it is no use)."""
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            return parsed(folder, file.read())
    except OSError as error:
        return None, f"{FILE} cannot be read ({error.strerror})"


def parsed(place: str, text: bytes | str) -> tuple[Benchmark | None, str]:
    """(the benchmark that a text tells of, "") or (None, why it is no use)."""
    told, problem = object_in(text, FILE)
    if problem := problem or lacking(told, SCHEMA_VERSION, _NEEDED, FILE):
        return None, problem
    try:
        benchmark = Benchmark(place, told)
        _walk(benchmark)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, f"{FILE} is damaged: it holds values of a wrong type"
    return benchmark, ""


def _walk(benchmark: Benchmark) -> None:
    """Use everything once, as a reader will."""
    for arm in benchmark["arms"].values():
        benchmark.timing_of(arm["precision"], benchmark["arms"][benchmark.reference]["precision"])
        _ = arm["without"], arm["skipped_steps"]
        share = arm["data_share"] or dict.fromkeys(("value", "low", "high"), 0.0)
        told = [arm["compile_s"] or 0.0, *arm["joules_per_sample"], share["value"], share["low"], share["high"]]
        _check_numbers(told)
    rounds = {(len(times), *map(len, times)) for times in (one["seconds_a_step"] for one in benchmark["columns"])}
    if len(rounds) != 1:
        raise ValueError("not every column was timed in every round")
    for column in benchmark["columns"]:
        ratio = Ratio(**column["ratio"]) if column["ratio"] else None
        numbers = [column["step_ms"], column["steps_of_a_block"], *(vars(ratio).values() if ratio else ())]
        numbers += [seconds for sitting in column["seconds_a_step"] for seconds in sitting]
        if not all(isinstance(value, int | float) and 0 < value < math.inf for value in numbers):
            raise ValueError("a time or a ratio is not above 0")
        over_eager = vars(Ratio(**column["over_eager"])).values() if column["over_eager"] else ()
        _check_numbers([column["busy_share"] or 0.0, *over_eager])
        _ = ratio and (ratio.word, ratio.pairs_needed)
    settings = [benchmark["settings"][key] for key in ("budget_s", "half_width")]
    known = benchmark["stopped_by"] in STOPPED_BY and all(isinstance(value, int | float) for value in settings)
    if not known or not benchmark["columns"]:
        raise ValueError("how it ended is not known")
    benchmark.disturbances()


def _check_numbers(values: list[Any]) -> None:
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError("what should be a number is none")
