"""Step time, throughput and peak memory of training steps. Never logs; knows nothing of precision.

Time outside a window (evaluation, logging, probing) is not counted, nor are the warm-up steps.
On a CUDA or MPS device a step's end is marked by an event in the stream: no step waits for the
device, and the events are read when a window closes, each as an end once: on MPS, one that was waited
for before may hang (pytorch issue 162872). Units: ms a step, samples a second, GiB.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from precision_lab.hardware import synchronize
from precision_lab.sizes import GIB


class Meter:
    """Accounts of one run: opened and closed around log points, a mark a step."""

    def __init__(
        self,
        device: torch.device,
        warmup_steps: int,
        mark: Callable[[], Any] | None = None,
        elapsed_ms: Callable[[Any, Any], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        untimed_steps: int = 0,
    ):
        """`untimed_steps` at the start count in no time at all, since an instrument is on them.

        `mark`, `elapsed_ms` and `clock` (seconds) are the device's own unless a test brings its clock.
        """
        self._device, self._clock = device, clock
        self._warmup, self._untimed = max(warmup_steps, untimed_steps), untimed_steps
        self._mark, self._elapsed_ms = (mark, elapsed_ms) if mark else timer(device)
        self._marks: list[Any] = []
        self._waits_ms: list[float] = []
        self._wait_ms = 0.0
        self._samples: list[int] = []
        self._steps = 0
        self.step_ms: list[float] = []
        self.train_s = 0.0  # of all windows, warm-up steps included, untimed ones not
        self._measured_wait_ms = 0.0
        self._measured_samples = 0
        self._peaks: dict[str, int] = {}

    def start(self) -> None:
        """Open a window: the next step begins now."""
        self._marks = [self._mark()]
        self._waits_ms, self._samples, self._wait_ms = [], [], 0.0
        self._reset_peak()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the host's wait for each counted."""
        start = self._clock()
        for batch in batches:
            self._wait_ms += (self._clock() - start) * 1e3
            yield batch
            start = self._clock()

    def step(self, samples: int) -> None:
        """Mark the end of a step that trained on `samples` samples."""
        self._marks.append(self._mark())
        self._waits_ms.append(self._wait_ms)
        self._samples.append(samples)
        self._wait_ms = 0.0
        self._steps += 1
        if self._steps == self._warmup:
            self._reset_peak()  # by now the optimizer state exists

    def close(self) -> list[float]:
        """Close the window and return the time of each of its measured steps in ms."""
        before = self._steps - len(self._samples)
        first = max(0, self._warmup - before)
        if len(self._marks) > 1:
            synchronize(self._device)  # not the last event, which is waited for when it is read
        of_all = [self._elapsed_ms(a, b) for a, b in pairwise(self._marks)]
        times = of_all[first:]
        self.step_ms += times
        self.train_s += sum(of_all[max(0, self._untimed - before) :]) / 1e3
        self._measured_wait_ms += sum(self._waits_ms[first:])
        self._measured_samples += sum(self._samples[first:])
        if times:
            self._read_peak()
        self._marks = []
        return times

    def state(self) -> dict[str, Any]:
        """The accounts between two windows as plain values, for a checkpoint: what `load_state` takes."""
        return {
            "step_ms": list(self.step_ms),
            "train_s": self.train_s,
            "wait_ms": self._measured_wait_ms,
            "samples": self._measured_samples,
            "peaks": dict(self._peaks),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there. The warm-up steps are left out again: this process has to warm up, too."""
        self.step_ms, self.train_s = list(state["step_ms"]), state["train_s"]
        self._measured_wait_ms, self._measured_samples = state["wait_ms"], state["samples"]
        self._peaks = dict(state["peaks"])

    def summary(self) -> dict[str, float | None]:
        """Median and 95th percentile of the step time, throughput, share of waiting for data, memory peaks.

        None stands for "not measured": no step after the warm-up, or a device that does not tell.
        """
        total_ms = sum(self.step_ms)
        measured = bool(self.step_ms)
        return {
            "perf/step_ms_p50": statistics.median(self.step_ms) if measured else None,
            "perf/step_ms_p95": percentile(self.step_ms, 0.95) if measured else None,
            "perf/measured_steps": len(self.step_ms),
            "perf/samples_per_s": self._measured_samples / total_ms * 1e3 if measured else None,
            "perf/data_wait_share": min(1.0, self._measured_wait_ms / total_ms) if measured else None,
            "mem/peak_allocated_gib": self._peak_gib("allocated"),
            "mem/peak_reserved_gib": self._peak_gib("reserved"),
        }

    def _peak_gib(self, kind: str) -> float | None:
        return self._peaks[kind] / GIB if kind in self._peaks else None

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _read_peak(self) -> None:
        if self._device.type == "cuda":
            now = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
            self._peaks = {kind: max(value, self._peaks.get(kind, 0)) for kind, value in now.items()}


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    # rounded first: 0.95 * 20 may come out just above 19
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)]


def timer(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """(mark, elapsed_ms): what marks a moment in the device's stream, and the ms between two that have passed."""
    if device.type == "cpu":
        return time.perf_counter, lambda start, end: (end - start) * 1e3
    event_type = {"cuda": torch.cuda.Event, "mps": torch.mps.Event}[device.type]

    def mark() -> Any:
        event = event_type(enable_timing=True)
        event.record()
        return event

    return mark, lambda start, end: start.elapsed_time(end)
