"""What fits into memory: a CPU's budget held, a step that ran out of memory put into words, and a batch that fits.

Knows trainers and takes real steps with them; refuses to know runs and folders. Batches are counted in samples of one
micro-batch; sizes in bytes, GiB = 2^30.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from precision_lab import hardware
from precision_lab.assemble import Assembly, Resolved
from precision_lab.batches import batch_of
from precision_lab.inspection import measured_step, step_peak
from precision_lab.sizes import GIB, size
from precision_lab.trainer import BETWEEN_STEPS, EVALUATION, Trainer

MEASURED_STEPS = 2  # the second one finds the optimizer's state there
_WHERE = {
    "data": "before step {step}, fetching its batch,",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "optimizer": "in the optimizer's part of step {step}",
    EVALUATION: "in the evaluation after step {step}",
    BETWEEN_STEPS: "after step {step}",
}
Measured = TypeVar("Measured")


class OverBudget(MemoryError):
    """A step took more of a CPU's memory than device.memory_budget_gib."""

    def __init__(self, peak_bytes: int, budget: int):
        super().__init__(f"the peak of {size(peak_bytes)} is above device.memory_budget_gib, {size(budget)}")
        self.peak_bytes = peak_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """Where memory ran out. `fits`: the largest batch seen to fit, 0 for none, None where it was not looked for."""

    step: int  # from 1; where it was in none, the last one done
    phase: str  # model: while it was moved to the device; or one of _WHERE
    peak_bytes: int | None  # None on a device that does not tell
    batch_size: int
    fits: int | None = None

    @classmethod
    def told_by(cls, error: BaseException, trainer: Trainer | None, resolved: Resolved) -> "OutOfMemory":
        """Call it where the error is caught: a peak is of all that was done since. No trainer: before the training."""
        peak = error.peak_bytes if isinstance(error, OverBudget) else None
        if resolved.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        if trainer is None:
            return cls(0, "model", peak, resolved.asked.trainer.batch_size)
        within = trainer.phase not in (BETWEEN_STEPS, EVALUATION)
        return cls(trainer.done + within, trainer.phase, peak, trainer.plan.batch_size)

    def with_what_fits(self, trainer: Trainer, ready: Assembly) -> "OutOfMemory":
        """Look for a batch that fits, if it was a step that did not: half, a quarter, ... of it, in real steps.

        Call it where nothing holds the failed step's tensors any more. Leaves the trainer of no use.
        """
        if self.phase in ("model", EVALUATION, BETWEEN_STEPS):
            return self
        return dataclasses.replace(self, fits=_largest_halved(trainer, ready))

    def sentence(self, accumulation: int) -> str:
        """What happened and, if that is known, what to do about it. Not of the phase model, whose error says it."""
        where = _WHERE[self.phase].format(step=self.step)
        peak = f" at {size(self.peak_bytes)}" if self.peak_bytes else ""
        told = f"out of memory {where}{peak} (batch {self.batch_size})"
        if self.fits is None:
            return told
        if not self.fits:
            return f"{told}; not even a batch of 1 fits"
        whole = max(micro for micro in range(1, self.fits + 1) if self.batch_size % micro == 0)
        advice = f"trainer.batch_size={self.fits}"
        if 2 * whole > self.fits:
            steps = accumulation * self.batch_size // whole
            advice = f"trainer.batch_size={whole} trainer.accumulation={steps} keeps the step"
        return f"{told}; a batch of {self.fits} fits: {advice}"


def budget_of(ready: Assembly) -> int | None:
    """Bytes that a step may take where they must be measured, which is on a CPU; elsewhere the allocator refuses."""
    gib = ready.asked.device.memory_budget_gib
    return int(gib * GIB) if gib is not None and ready.policy.device.type == "cpu" else None


def hold_to_budget(trainer: Trainer, ready: Assembly, steps: int = MEASURED_STEPS) -> int:
    """Have the next steps measured, and OverBudget raised by one that takes too much; return how many are measured.

    A measured step takes longer and is otherwise the same to the bit.
    """
    budget = budget_of(ready)
    if budget is None:
        return 0

    def measured(batches: Iterator[Any]) -> None:
        del trainer.step  # from here on the class's own again
        found = measured_step(trainer, batches)
        if found.peak_bytes > budget:
            trainer.phase = found.phase
            raise OverBudget(found.peak_bytes, budget)
        if steps > 1:
            hold_to_budget(trainer, ready, steps - 1)

    trainer.step = measured
    return steps


def _largest_halved(trainer: Trainer, ready: Assembly) -> int | None:
    budget, samples = budget_of(ready), trainer.plan.batch_size // 2
    # the steps to take instead accumulate, and then a forward finds the gradients of the one before
    trainer.plan = dataclasses.replace(trainer.plan, accumulation=max(2, trainer.plan.accumulation))
    trainer.model.train()
    try:
        begin_anew(trainer)
        while samples:
            peak = peak_at(trainer, ready, samples)
            if peak is not None and (budget is None or peak <= budget):
                return samples
            samples //= 2
    except Exception:  # batch norm, say, refuses a single sample
        return None
    return 0


def peak_at(trainer: Trainer, ready: Assembly, samples: int) -> int | None:
    """Bytes of the peak of a step on so many samples, the optimizer's state being there; None where memory ran out."""
    if not trainer.optimizer.state:
        tried(step_peak, trainer, ready, samples)
    return tried(step_peak, trainer, ready, samples)


def tried(
    measure: Callable[[Trainer, Any], Measured], trainer: Trainer, ready: Assembly, samples: int
) -> Measured | None:
    """What is measured in a step on so many samples; None where memory ran out."""
    trainer.plan = dataclasses.replace(trainer.plan, batch_size=samples)
    try:
        return measure(trainer, batch_of(ready.workload.data.train, samples, ready.place))
    except Exception as error:
        if not hardware.is_out_of_memory(error):
            raise
    # Out here nothing holds the failed step's tensors.
    begin_anew(trainer)
    return None


def begin_anew(trainer: Trainer) -> None:
    """Drop what a step that ran out of memory left half done."""
    trainer.optimizer.zero_grad()
    trainer.optimizer.state.clear()
    trainer.scaler = trainer.policy.grad_scaler()
    trainer.window = type(trainer.window)()
    hardware.release_memory()
