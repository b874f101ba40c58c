"""A benchmark, start to end: sittings until every ratio is narrow enough or the time is over, and what came out.

Each arm's blocks are paired with the reference arm's of the same round. A second copy of the reference arm runs along:
its ratio to the first is the noise floor, and where its interval leaves 1 out, nothing that was measured is trusted.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy

from precision_lab import hardware
from precision_lab.assemble import Assembly, assemble, resolve
from precision_lab.benchmark.conditions import Gpu, conditions
from precision_lab.benchmark.sittings import Apart, Column, Notes, OutOfMemory, Together
from precision_lab.columns import again
from precision_lab.config import Config, as_values
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.identity import experiment_signature
from precision_lab.ratios import Ratio, ratio_of
from precision_lab.report.benchmarks import SCHEMA_VERSION
from precision_lab.settings import BenchmarkConfig

LEAST_SITTINGS, LEAST_PAIRS = 3, 20
SETTLED_SITTINGS = 10  # before which intervals may be narrow by chance
# Of the noise floor's interval: one in twenty of 95 % would leave 1 out by chance, and a verdict with it.
FLOOR_CONFIDENCE = 0.99
ENERGY_WINDOW_S = 5.0  # the counter is updated about every 0.1 s


@dataclass
class Measured:
    """What the sittings gave: seconds a step, by column, sitting and round."""

    reference: str
    asked: dict[str, Config]  # by arm
    sittings: list[dict[Column, list[float]]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    stopped_by: str = ""  # width | budget | interrupted
    seconds: float = 0.0
    apart: bool = False  # in processes that took turns
    without: dict[str, str] = field(default_factory=dict)  # arms that were not timed, and why
    during: list[dict[str, Any]] = field(default_factory=list)  # how the GPU stood when a sitting ended

    @property
    def columns(self) -> list[Column]:
        return list(self.sittings[-1]) if self.sittings else []

    @property
    def pairs(self) -> int:
        """How many rounds there were."""
        return sum(len(next(iter(sitting.values()))) for sitting in self.sittings)

    def ratio(self, column: Column, confidence: float = 0.95, base: Column | None = None) -> Ratio:
        """Of one column beside another, the reference arm's of its kind unless told otherwise."""
        base = base or replace(column, arm=self.reference)
        whole = [sitting for sitting in self.sittings if column in sitting and base in sitting]
        return ratio_of([numpy.log(sitting[base]) - numpy.log(sitting[column]) for sitting in whole], confidence)

    def data_share(self, column: Column) -> dict[str, float] | None:
        """Share of a step with the loader that computing does not hide, 1 - computing / whole, and its interval."""
        whole = replace(column, with_data=True)
        if whole not in self.columns:
            return None
        hidden = self.ratio(whole, base=replace(column, with_data=False))  # computing / whole
        shares = {"value": hidden.value, "low": hidden.high, "high": hidden.low}
        return {end: max(0.0, 1 - value) for end, value in shares.items()}

    def resolved(self, half_width: float) -> bool:
        """Whether every 95 % interval is narrow enough, and the noise floor holds 1."""
        if len(self.sittings) < SETTLED_SITTINGS or self.pairs < LEAST_PAIRS:
            return False
        others = [column for column in self.columns if column.arm != self.reference]
        if any(self.ratio(column).half_width > half_width for column in others):
            return False
        floor = [self.ratio(column, FLOOR_CONFIDENCE) for column in others if column.arm == again(self.reference)]
        return all(ratio.low <= 1 <= ratio.high for ratio in floor)


def measure(asked: dict[str, Config], settings: BenchmarkConfig, told: Callable[[Measured], None]) -> dict[str, Any]:
    """Time the arms and return what benchmark.json says. `told` is called when a sitting ends.

    The reference is one of them. InputError for an arm that this machine cannot do, or a reference arm that does not
    fit into memory. Ctrl-C ends it with what there is; before there are two pairs it is raised.
    """
    resolved = {label: resolve(one) for label, one in asked.items()}
    device = resolved[settings.reference].device
    gpu = Gpu(device)
    before = conditions(gpu)
    first = assemble(resolved[settings.reference])
    ready = {label: assemble(one, first.workload) for label, one in resolved.items()}
    measured = Measured(settings.reference, {label: one.asked for label, one in ready.items()})

    def after_a_sitting(one: Measured) -> None:
        if gpu.available:
            one.during.append(gpu.state())
        told(one)

    source = take_sittings(_source(measured, ready, settings), measured, settings, after_a_sitting)
    energy = _look(source, measured, gpu)
    environment = environment_of(device)
    return {
        "schema": SCHEMA_VERSION,
        "name": first.asked.name,
        "experiment_signature": experiment_signature(first.asked),
        "data_hash": first.workload.data.hash,
        **{key: environment[key] for key in ("fingerprint", "host", "versions", "git")},
        "support": resolved[settings.reference].support,
        "finished": time.time(),
        "settings": as_values(settings),
        "conditions": {"start": before, "during": _worst(measured.during), "end": conditions(gpu)},
        "energy": energy,
        **_summary(measured),
        "config": as_values(first.asked),
    }


def _worst(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states at the sittings' ends: every reason to hold the clocks down, the lowest clock, the highest heat."""

    def known(key: str) -> list[Any]:
        return [state[key] for state in states if state.get(key) is not None]

    return {
        "throttled_by": sorted({reason for reasons in known("throttled_by") for reason in reasons}),
        "sm_clock_mhz": min(known("sm_clock_mhz"), default=None),
        "temperature_c": max(known("temperature_c"), default=None),
        "power_w": max(known("power_w"), default=None),
        "other_processes": sorted({pid for pids in known("other_processes") for pid in pids}),
    }


def _look(source: Together | Apart, measured: Measured, gpu: Gpu) -> str:
    """What a GPU is asked once all is timed; returns what is known of the energy, or why it is not."""
    if gpu.why_not.startswith("no CUDA"):
        return f"not measured: {gpu.why_not}"
    if measured.stopped_by == "interrupted":
        return "not measured: interrupted"
    if isinstance(source, Apart):
        return "not measured: arms in processes"
    counter = gpu.joules if gpu.joules() is not None else None
    wanted = [column for column in measured.columns if not column.with_data and column.arm != again(measured.reference)]
    try:
        typical = {column: _quartiles(measured, column)[1] for column in wanted}
        source.look(typical, counter, ENERGY_WINDOW_S)
    except (KeyboardInterrupt, Exception) as error:  # what was timed stands, whatever the profiler or the counter does
        measured.notes.joules_a_step.clear()
        return f"not measured: {str(error).split(chr(10))[0] or 'interrupted'}"
    if counter:
        return "from the device's counter"
    return f"not measured: {gpu.why_not or 'this device has no energy counter'}"


def take_sittings(
    source: Together | Apart, measured: Measured, settings: BenchmarkConfig, told: Callable[[Measured], None]
) -> Together | Apart:
    """Add sittings to `measured` until it is resolved, or the time is over, or Ctrl-C ends it."""
    began = time.monotonic()
    try:
        while not measured.stopped_by:
            source = _sit(source, measured, settings, began)
            measured.seconds = time.monotonic() - began
            if measured.pairs > 1:
                told(measured)
    except KeyboardInterrupt:
        if measured.pairs < 2:
            raise
        measured.stopped_by = "interrupted"
    return source


def _source(measured: Measured, ready: dict[str, Assembly], settings: BenchmarkConfig) -> Together | Apart:
    own = ready[measured.reference].asked.device.compile
    kinds = (own,) if own or not settings.compiled else (False, True)
    copy = {again(measured.reference): ready[measured.reference]}
    measured.apart = settings.processes is True
    if not measured.apart:
        together = Together(ready | copy, settings.data, kinds)
        if settings.processes is False or together.fits():
            measured.notes = together.notes
            return together
        measured.apart = True
    apart = Apart({label: one.asked for label, one in (ready | copy).items()}, settings.data, kinds)
    measured.notes = apart.notes
    return apart


def _sit(source: Together | Apart, measured: Measured, settings: BenchmarkConfig, began: float) -> Together | Apart:
    """One more sitting, and whether it was the last; from arms in one process to processes where they do not fit."""
    until, no_room = began + settings.budget_s, False
    try:
        measured.sittings.append(source.sit(until))
    except OutOfMemory as error:
        if error.arm in (measured.reference, again(measured.reference)):
            raise InputError(
                f"The reference arm {measured.reference} does not fit into memory by itself; name another reference, "
                "or set a smaller trainer.batch_size."
            ) from error
        measured.without[error.arm] = "out of memory"
        source.leave_out(error.arm)
    except RuntimeError as error:
        if not isinstance(source, Together) or not hardware.is_out_of_memory(error):
            raise
        if settings.processes is False:
            raise InputError(
                "The arms do not fit into memory together; set processes=null, or a smaller trainer.batch_size."
            ) from error
        no_room = True
    if no_room:  # out here nothing holds the models any more
        source = source.apart()
        measured.sittings.clear()
        measured.notes, measured.apart = source.notes, True
    if measured.resolved(settings.half_width):
        measured.stopped_by = "width"
    elif time.monotonic() > until and len(measured.sittings) >= LEAST_SITTINGS:
        measured.stopped_by = "budget"
    return source


def _summary(measured: Measured) -> dict[str, Any]:
    notes = measured.notes
    own = next(iter(measured.asked.values())).device.compile
    arms = {}
    for label, asked in measured.asked.items():
        samples = asked.trainer.batch_size * asked.trainer.accumulation
        arms[label] = {
            "precision": as_values(asked.precision),
            "without": measured.without.get(label),
            "data_share": measured.data_share(Column(label, own)),
            "skipped_steps": notes.skipped_steps.get(label),
            "compile_s": notes.compile_s.get(label),
            "joules_per_sample": [joules / samples for joules in notes.joules_a_step.get(label, [])],
        }
    return {
        "reference": measured.reference,
        "stopped_by": measured.stopped_by,
        "seconds": measured.seconds,
        "sittings": len(measured.sittings),
        "in_processes": measured.apart,
        "warm_up_capped": notes.not_steady,
        "arms": arms,
        "columns": [_of_column(measured, column) for column in measured.columns],
    }


def _of_column(measured: Measured, column: Column) -> dict[str, Any]:
    notes, copy = measured.notes, column.arm == again(measured.reference)
    low, median, high = (seconds * 1e3 for seconds in _quartiles(measured, column))
    eager = replace(column, compiled=False)
    beside_eager = column.compiled and eager in measured.columns
    confidence = FLOOR_CONFIDENCE if copy else 0.95
    ratio = None if column.arm == measured.reference else measured.ratio(column, confidence)
    return {
        "arm": measured.reference if copy else column.arm,
        "again": copy,
        "compiled": column.compiled,
        "with_data": column.with_data,
        "step_ms": median,
        "step_ms_p25": low,
        "step_ms_p75": high,
        "steps_of_a_block": notes.steps_of_a_block[column.with_data],
        "busy_share": notes.busy_share.get(column),
        "ratio": ratio and asdict(ratio),
        "over_eager": asdict(measured.ratio(column, base=eager)) if beside_eager else None,
        "seconds_a_step": [[float(f"{seconds:.6g}") for seconds in one[column]] for one in measured.sittings],
    }


def _quartiles(measured: Measured, column: Column) -> list[float]:
    """Seconds a step over all rounds: lower quartile, median, upper quartile."""
    times = numpy.concatenate([sitting[column] for sitting in measured.sittings])
    return [float(end) for end in numpy.quantile(times, (0.25, 0.5, 0.75))]
