"""A benchmark, start to end: sittings until every ratio is narrow enough or the time is over, and what came out.

Each arm's blocks are paired with the reference arm's of the same round. A second copy of the reference arm runs along:
its ratio to the first is the noise floor, and where its interval leaves 1 out, nothing that was measured is trusted.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy

from precision_lab import hardware
from precision_lab.assemble import Assembly, assemble, resolve
from precision_lab.benchmark.conditions import Gpu, conditions
from precision_lab.benchmark.sittings import Apart, Column, Notes, OutOfMemory, Together
from precision_lab.config import BenchmarkConfig, Config, as_values
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.identity import experiment_signature
from precision_lab.ratios import Ratio, ratio_of

SCHEMA_VERSION = 1
AGAIN = "again"  # the reference arm's second copy is `fp32 again`
LEAST_SITTINGS, LEAST_PAIRS = 5, 20
SETTLED_SITTINGS = 10  # before which intervals may be narrow by chance
# Of the noise floor's interval: one in twenty of 95 % would leave 1 out by chance, and a verdict with it.
FLOOR_CONFIDENCE = 0.99
ENERGY_WINDOW_S = 5.0  # the counter is updated about every 0.1 s


@dataclass
class Measured:
    """What the sittings gave: seconds a step, by column, sitting and round."""

    reference: str
    asked: dict[str, Config]  # by arm, without those that do not fit
    sittings: list[dict[Column, list[float]]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    stopped_by: str = ""  # width | budget | interrupted
    seconds: float = 0.0
    apart: bool = False  # in processes that took turns
    without: dict[str, str] = field(default_factory=dict)  # arms that were not timed, and why
    joules_per_step: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> list[Column]:
        return list(self.sittings[-1]) if self.sittings else []

    def ratios(self) -> dict[Column, Ratio]:
        """Of every column beside the reference arm's of its kind; the noise floor's at FLOOR_CONFIDENCE."""
        floor = {True: FLOOR_CONFIDENCE, False: 0.95}
        others = [column for column in self.columns if column.arm != self.reference]
        return {column: self.ratio(column, floor[column.arm == again(self.reference)]) for column in others}

    def ratio(self, column: Column, confidence: float = 0.95) -> Ratio:
        """Of one column beside the reference arm's of its kind."""
        base = replace(column, arm=self.reference)
        whole = [sitting for sitting in self.sittings if column in sitting]
        return ratio_of([numpy.log(sitting[base]) - numpy.log(sitting[column]) for sitting in whole], confidence)

    def data_share(self, arm: str) -> float | None:
        """Share of a step with the loader that computing does not hide: 1 - computing alone / whole, the median."""
        whole, computing = Column(arm, with_data=True), Column(arm)
        pairs = [
            pair
            for sitting in self.sittings
            if whole in sitting
            for pair in zip(sitting[computing], sitting[whole], strict=True)
        ]
        return max(0.0, statistics.median(1 - alone / both for alone, both in pairs)) if pairs else None

    def resolved(self, half_width: float) -> bool:
        """Whether every 95 % interval is narrow enough, and the noise floor holds 1."""
        if len(self.sittings) < SETTLED_SITTINGS:
            return False
        ratios = [self.ratio(column) for column in self.columns if column.arm != self.reference]
        floor = [ratio for column, ratio in self.ratios().items() if column.arm == again(self.reference)]
        narrow = all(ratio.pairs >= LEAST_PAIRS and ratio.half_width <= half_width for ratio in ratios)
        return narrow and all(ratio.low <= 1 <= ratio.high for ratio in floor)


def again(reference: str) -> str:
    """The label of the reference arm's second copy."""
    return f"{reference} {AGAIN}"


def measure(asked: dict[str, Config], settings: BenchmarkConfig, told: Callable[[Measured], None]) -> dict[str, Any]:
    """Time the arms and return what benchmark.json says. `told` is called when a sitting ends.

    The reference is one of them. InputError for an arm that this machine cannot do, or a reference arm that does not
    fit into memory. Ctrl-C ends it with what there is; before the first sitting it is raised.
    """
    resolved = {label: resolve(one) for label, one in asked.items()}
    device = resolved[settings.reference].device
    gpu = Gpu(device)
    before = conditions(gpu)
    ready = {label: assemble(one) for label, one in resolved.items()}
    asked = {label: one.asked for label, one in ready.items()}
    measured = Measured(settings.reference, asked)
    source = take_sittings(_source(measured, ready, settings), measured, settings, told)
    if isinstance(source, Together) and gpu.joules() is not None and measured.stopped_by != "interrupted":
        measured.joules_per_step = source.energy(gpu.joules, ENERGY_WINDOW_S)
    first = ready[settings.reference]
    return {
        "schema": SCHEMA_VERSION,
        "name": first.asked.name,
        "experiment_signature": experiment_signature(first.asked),
        "data_hash": first.workload.data.hash,
        **{key: environment_of(device)[key] for key in ("fingerprint", "host", "versions", "git")},
        "support": resolved[settings.reference].support,
        "finished": time.time(),
        "settings": as_values(settings),
        "conditions": {"start": before, "end": conditions(gpu)},
        "energy": "from the device's counter" if measured.joules_per_step else f"not measured: {gpu.why_not}",
        **_summary(measured),
        "config": as_values(first.asked),
    }


def take_sittings(
    source: Together | Apart, measured: Measured, settings: BenchmarkConfig, told: Callable[[Measured], None]
) -> Together | Apart:
    """Add sittings to `measured` until it is resolved, or the time is over, or Ctrl-C ends it."""
    began = time.monotonic()
    try:
        while not measured.stopped_by:
            source = _sit(source, measured, settings, began)
            measured.seconds = time.monotonic() - began
            told(measured)
    except KeyboardInterrupt:
        if not measured.sittings:
            raise
        measured.stopped_by = "interrupted"
    return source


def _source(measured: Measured, ready: dict[str, Assembly], settings: BenchmarkConfig) -> Together | Apart:
    kinds = (False, True) if settings.compiled else (False,)
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
    until = began + settings.budget_s
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
        source = source.apart()
        measured.sittings.clear()
        measured.notes, measured.apart = source.notes, True
    if measured.resolved(settings.half_width):
        measured.stopped_by = "width"
    elif time.monotonic() > until and len(measured.sittings) >= LEAST_SITTINGS:
        measured.stopped_by = "budget"
    return source


def _summary(measured: Measured) -> dict[str, Any]:
    notes, ratios = measured.notes, measured.ratios()
    copy = again(measured.reference)
    arms = {}
    for label, asked in measured.asked.items():
        plan = asked.trainer
        joules = measured.joules_per_step.get(label)
        arms[label] = {
            "precision": as_values(asked.precision),
            "without": measured.without.get(label),
            "data_share": measured.data_share(label),
            "skipped_steps": notes.skipped_steps.get(label),
            "compile_s": notes.compile_s.get(label),
            "joules_per_sample": joules and joules / (plan.batch_size * plan.accumulation),
        }
    return {
        "reference": measured.reference,
        "stopped_by": measured.stopped_by,
        "seconds": measured.seconds,
        "sittings": len(measured.sittings),
        "in_processes": measured.apart,
        "warm_up_capped": notes.not_steady,
        "arms": arms,
        "columns": [
            {
                "arm": measured.reference if column.arm == copy else column.arm,
                "again": column.arm == copy,
                "compiled": column.compiled,
                "with_data": column.with_data,
                **_step_ms([seconds for sitting in measured.sittings for seconds in sitting.get(column, [])]),
                "steps_of_a_block": notes.steps_of_a_block[column],
                "busy_share": notes.busy_share.get(column),
                "ratio": asdict(ratios[column]) if column in ratios else None,
                "seconds_a_step": [
                    [float(f"{s:.6g}") for s in sitting.get(column, [])] for sitting in measured.sittings
                ],
            }
            for column in measured.columns
        ],
    }


def _step_ms(seconds: list[float]) -> dict[str, float]:
    low, median, high = numpy.quantile(seconds, (0.25, 0.5, 0.75)) * 1e3
    return {"step_ms": float(median), "step_ms_p25": float(low), "step_ms_p75": float(high)}
