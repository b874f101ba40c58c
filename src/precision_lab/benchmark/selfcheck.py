"""Whether the benchmark can be believed on this machine: it times the same arm against itself, and against delays.

Every trial is a whole benchmark of four copies of one arm: the reference, a copy as it is, and two whose steps are
delayed by a known share. A copy that comes out faster or slower is a false call, a delay that does not is a miss.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_lab import hardware
from precision_lab.assemble import Assembly, assemble, resolve
from precision_lab.benchmark.blocks import Contestant
from precision_lab.benchmark.measure import FLOOR_CONFIDENCE, Measured, take_sittings
from precision_lab.benchmark.sittings import Column, Together, in_turn
from precision_lab.columns import again
from precision_lab.config import Config
from precision_lab.identity import arm_label
from precision_lab.ratios import Ratio
from precision_lab.settings import BenchmarkConfig

COPIES = 2  # of the reference arm, in each trial
FALSE_CALLS = 0.05  # share of the copies' comparisons that passes
FOUND_AT_LEAST = {0.05: 0.9, 0.20: 1.0}  # delay, as a share of the step -> share of the trials that must find it


@dataclass
class Checked:
    """What came out of the trials."""

    copies: list[Ratio] = field(default_factory=list)
    delayed: dict[float, list[Ratio]] = field(default_factory=lambda: {share: [] for share in FOUND_AT_LEAST})
    untrusted: int = 0  # trials in which the first copy's 99 % interval left 1 out
    seconds: list[float] = field(default_factory=list)  # of the trials

    @property
    def false_calls(self) -> int:
        """Copies that were called faster or slower."""
        return sum(ratio.word in ("faster", "slower") for ratio in self.copies)

    @property
    def false_calls_allowed(self) -> int:
        """A share of the comparisons, rounded up."""
        return math.ceil(FALSE_CALLS * len(self.copies))

    @property
    def sound(self) -> bool:
        """Whether there were few enough false calls and misses."""
        found = all(
            self.found(share) >= math.floor(needed * len(self.seconds)) for share, needed in FOUND_AT_LEAST.items()
        )
        return bool(self.copies) and found and self.false_calls <= self.false_calls_allowed

    def found(self, share: float) -> int:
        """Delays of that share that were called slower."""
        return sum(ratio.word == "slower" for ratio in self.delayed[share])


class _Delayed(Contestant):
    """A copy whose every step takes `share` longer: on CUDA by a kernel that waits, elsewhere by the host itself."""

    share = 0.0
    _cycles = 0  # of the kernel that waits

    def measure_step(self, batches: Iterator[Any]) -> None:
        """Find out what the share is of; a host does so at each step."""
        if self._device.type == "cuda":
            step_s = statistics.median(self.steps(batches, 25, lead_in=1))
            start = self._mark()
            torch.cuda._sleep(10**8)
            end = self._mark()
            end.synchronize()
            self._cycles = int(self.share * step_s * 10**8 / (self._elapsed_ms(start, end) / 1e3))

    def _step(self, batches: Iterator[Any]) -> None:
        began = time.perf_counter()
        super()._step(batches)
        if self._device.type == "cuda":
            torch.cuda._sleep(self._cycles)
            return
        hardware.synchronize(self._device)
        until = time.perf_counter() + self.share * (time.perf_counter() - began)
        while time.perf_counter() < until:  # to sleep would hand the core over, and take longer than asked for
            pass


class _Trial(Together):
    """Copies of one arm, by label, each with its delay."""

    def _build(self) -> dict[tuple[str, bool], Contestant]:
        built = {}
        for label in in_turn(list(self._ready), self._sittings):
            built[label, False] = one = _Delayed(self._ready[label], compiled=False)
            one.share = DELAYED.get(label, 0.0)
            one.measure_step(self._ring.from_step(0))
        return built


DELAYED = {f"delayed by {share:.0%}": share for share in FOUND_AT_LEAST}


def self_check(asked: Config, tries: int, settings: BenchmarkConfig, told: Callable[[Checked], None]) -> Checked:
    """Hold `tries` trials, each within the settings' time budget. `told` is called after each one."""
    ready: Assembly = assemble(resolve(asked))
    reference = arm_label(ready.asked.precision)
    copies = [again(reference), *(f"{again(reference)} {n}" for n in range(2, COPIES + 1))]
    labels = [reference, *copies, *DELAYED]
    checked = Checked()
    for _ in range(tries):
        measured = Measured(reference, dict.fromkeys(labels, ready.asked))
        take_sittings(_Trial(dict.fromkeys(labels, ready), False, (False,)), measured, settings, lambda _: None)
        if measured.stopped_by == "interrupted":
            raise KeyboardInterrupt
        ratios = {label: measured.ratio(Column(label)) for label in labels[1:]}
        floor = measured.ratio(Column(again(reference)), FLOOR_CONFIDENCE)
        checked.copies += [ratios[copy] for copy in copies]
        checked.untrusted += not floor.low <= 1 <= floor.high
        checked.seconds.append(measured.seconds)
        for label, share in DELAYED.items():
            checked.delayed[share].append(ratios[label])
        told(checked)
    return checked
