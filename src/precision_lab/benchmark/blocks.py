"""Blocks of one arm's training steps, and the clock that times them. Knows nothing of the other arms.

A step is `Trainer.step`, whole, at a learning rate of 0: every kernel runs, and no weight ever changes. So each block
of each arm does the same work, from equal weights, however long the benchmark takes. Units: seconds.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from precision_lab import hardware
from precision_lab.assemble import Assembly, build_model, make_trainer, training_batches
from precision_lab.identity import arm_label
from precision_lab.meter import timer

# A warm-up ends where the median of the last steps is not below this share of those before, and none was skipped.
# The process's first one has more to warm: threads, caches, algorithms to be chosen.
WARM_STEPS, LATER_WARM_STEPS, WARM_SHARE, WARM_TURNS = 10, 4, 0.9, 10
STAGED_BATCHES, STAGED_BYTES = 16, 2**28
CLOCK_SHARE = 1e-3  # of a block, that reading the clock may cost
LONG_STEP_S = 0.05
# Steps of a block, where the clock asks for no more. At least two: the host loads data while the device computes.
SHORT_BLOCK, LEAST_BLOCK = 5, 2


class Contestant:
    """A model of one arm, built for one sitting, with its optimizer and its accounts."""

    def __init__(self, ready: Assembly, compiled: bool):
        asked = replace(ready.asked, device=replace(ready.asked.device, compile=compiled))
        workload = replace(ready.workload, model=build_model(asked, ready.workload.data))
        self._policy, self._device = ready.policy, ready.policy.device
        self._policy.apply_backends()
        self._trainer = make_trainer(replace(ready, asked=asked, workload=workload))
        self._trainer.model.train()
        for group in self._trainer.optimizer.param_groups:
            group["lr"] = 0.0
        self._mark, self._elapsed_ms = timer(self._device)
        self.skipped_steps = 0

    def steps(self, batches: Iterator[Any], steps: int, lead_in: int = 0) -> list[float]:
        """Seconds of each of `steps` steps, after `lead_in` that are not timed: caches and clocks change hands."""
        self._policy.apply_backends()  # another arm had the process before
        try:
            for _ in range(lead_in):
                self._step(batches)
            marks = [self._mark()]
            for _ in range(steps):
                self._step(batches)
                marks.append(self._mark())
        except Exception as error:
            error.add_note(f"raised in a step of the arm {arm_label(self._policy.config)}")
            raise
        hardware.synchronize(self._device)  # once a block: the marks lie in the device's stream
        _, _, skipped = self._trainer.window.read()
        self.skipped_steps = int(skipped.sum())  # of the last call
        self._policy.check_float32()
        return [self._elapsed_ms(a, b) / 1e3 for a, b in pairwise(marks)]

    def _step(self, batches: Iterator[Any]) -> None:
        self._trainer.step(batches)

    def busy_share(self, batches: Iterator[Any], steps: int, step_s: float) -> float | None:
        """Share of `step_s` in which a kernel runs on the GPU, from the profile of one block; None off CUDA."""
        if self._device.type != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.steps(batches, steps)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        return min(1.0, covered(spans) * 1e-6 / (steps * step_s))


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels of two streams may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def clock_cost(device: torch.device) -> float:
    """Seconds that it costs the host to time nothing (median of 20)."""
    mark, _ = timer(device)

    def once() -> float:
        start = time.perf_counter()
        mark(), mark()
        hardware.synchronize(device)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(20))


def steps_of_a_block(step_s: float, cost_s: float) -> int:
    """As few steps as the clock's cost allows, by the fastest arm: blocks close together share the machine's noise."""
    usual = LEAST_BLOCK if step_s >= LONG_STEP_S else SHORT_BLOCK
    return max(usual, math.ceil(cost_s / (CLOCK_SHARE * step_s)))


def warm_up(contestants: list[Contestant], ring: "Ring", until: float, first: bool) -> bool:
    """Take turns of steps until all are steady; False if they are not after WARM_TURNS, or at the time `until`.

    Turns are shared, so that every contestant takes equally many steps.
    """
    steps = WARM_STEPS if first else LATER_WARM_STEPS
    medians: list[list[float]] = [[] for _ in contestants]
    for turn in range(WARM_TURNS):
        skipped = 0
        for contestant, known in zip(contestants, medians, strict=True):
            batches = ring.from_step(turn * steps)
            known.append(statistics.median(contestant.steps(batches, steps)))
            skipped += contestant.skipped_steps
        steady = turn > 0 and all(known[-1] >= WARM_SHARE * known[-2] for known in medians)
        if steady and not skipped:
            return True
        if time.monotonic() > until:
            break
    return False


class Ring:
    """The first batches of the run, on the device: equal for all arms, and no loading to wait for."""

    def __init__(self, ready: Assembly):
        batches = training_batches(ready)
        self._staged = [next(batches)]
        size = sum(leaf.nbytes for leaf in tree_leaves(self._staged[0]) if isinstance(leaf, torch.Tensor))
        self._staged += [next(batches) for _ in range(min(STAGED_BATCHES, STAGED_BYTES // max(1, size)) - 1)]

    def from_step(self, step: int) -> Iterator[Any]:
        """Endless, from the batch of that step on."""
        while True:
            yield self._staged[step % len(self._staged)]
            step += 1
