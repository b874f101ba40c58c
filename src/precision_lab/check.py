"""`python train.py check=true`: what would run, how long its first steps take and how much memory they need.

Knows real steps, which are thrown away; writes no run folder. Its times are an indication: few steps, one after the
other. Units: ms a step, bytes.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_lab import hardware, identity
from precision_lab.assemble import Assembly, Resolved, assemble, make_trainer, resolve, training_batches
from precision_lab.config import Config
from precision_lab.errors import InputError
from precision_lab.fitting import OutOfMemory, OverBudget, budget_of
from precision_lab.inspection import checkpoint_bytes, measured_step, step_peak
from precision_lab.sizes import size
from precision_lab.targets import raised
from precision_lab.terminal import CHECK_FILE, CHECKED
from precision_lab.trainer import Trainer

STEPS = 5  # to time, after the first
LIMIT_S = 10.0  # after which no further step begins
_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's part"}


@dataclass(frozen=True)
class Outlook:
    """What a few steps showed. None: not seen, or a device that does not tell."""

    step_ms: float | None = None  # the median, or the only one's
    timed_steps: int = 0  # 0: `step_ms` is of the first step, which warms up
    peak_bytes: int | None = None
    phase: str | None = None  # that the peak sits in
    steady: bool = False  # whether the optimizer's state was there when the peak was measured
    checkpoint_bytes: int | None = None
    out_of_memory: str | None = None  # in a sentence


def check(asked: Config, folder: Path | None = None) -> int:
    """Say what would run, and return the exit code 0. InputError for what is wrong with it.

    What was found goes to a file in `folder`, too, if there is one.
    """
    resolved = resolve(asked)
    ready = assemble(resolved)
    outlook = look(ready, resolved)
    title = identity.title(resolved.asked)
    lines = [_plan(ready), *_told(outlook)]
    verdict = "a step does not fit into memory" if outlook.out_of_memory else "the input is right"
    end = f"{title}: {verdict}; {CHECKED}"
    print(*resolved.notes, *ready.notes, title, *(f"  {line}" for line in lines), end, sep="\n")
    if folder:
        (folder / CHECK_FILE).write_text(json.dumps(dataclasses.asdict(outlook)))
    return 0


def look(ready: Assembly, resolved: Resolved) -> Outlook:
    """Take a few steps, and throw them away. InputError for a model that alone does not fit."""
    trainer = make_trainer(ready)
    trainer.model.train()
    seen: dict[str, Any] = {}
    try:
        _take_steps(trainer, ready, seen)
    except Exception as error:
        if isinstance(error, InputError):
            raise
        if not hardware.is_out_of_memory(error):
            raise InputError(raised("A step", error)) from error
        lost = OutOfMemory.told_by(error, trainer, resolved)
    else:
        trainer.policy.check_float32()
        return Outlook(**seen)
    # out here nothing holds the failed step's tensors
    sentence = lost.with_what_fits(trainer, ready).sentence(ready.asked.trainer.accumulation)
    return Outlook(**seen | {"out_of_memory": sentence, "peak_bytes": lost.peak_bytes, "phase": lost.phase})


def _take_steps(trainer: Trainer, ready: Assembly, seen: dict[str, Any]) -> None:
    """Enter into `seen` what an Outlook tells, as it becomes known."""
    batches, began = training_batches(ready), time.monotonic()
    _see_peak(trainer, ready, batches, seen)
    seen |= {"step_ms": (time.monotonic() - began) * 1e3, "checkpoint_bytes": checkpoint_bytes(trainer)}
    times: list[float] = []
    while len(times) < STEPS and time.monotonic() - began < LIMIT_S:
        start = time.perf_counter()
        trainer.step(batches)
        hardware.synchronize(trainer.policy.device)
        times.append((time.perf_counter() - start) * 1e3)
        trainer.done += 1
    if times:
        seen |= {"step_ms": statistics.median(times), "timed_steps": len(times)}
        _see_peak(trainer, ready, batches, seen)
        seen["steady"] = True


def _see_peak(trainer: Trainer, ready: Assembly, batches: Iterator[Any], seen: dict[str, Any]) -> None:
    device = trainer.policy.device.type
    if not ready.asked.device.compile:
        found = measured_step(trainer, batches)
        seen |= {"peak_bytes": found.peak_bytes, "phase": found.phase}
    elif device in ("cpu", "cuda"):
        seen |= {"peak_bytes": step_peak(trainer, next(batches))}
    else:
        trainer.step(batches)
    budget = budget_of(ready)
    if budget is not None and seen["peak_bytes"] > budget:
        trainer.phase = seen["phase"]
        raise OverBudget(seen["peak_bytes"], budget)
    trainer.done += 1


def _plan(ready: Assembly) -> str:
    plan, data = ready.asked.trainer, ready.workload.data
    parameters = sum(p.numel() for p in ready.workload.model.parameters())
    accumulated = f" in {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
    return (
        f"{ready.total_steps:,} steps of {plan.batch_size * plan.accumulation:,} samples{accumulated}, of "
        f"{len(data.train):,} to train on and {len(data.val):,} to validate; {parameters:,} parameters"
    )


def _told(seen: Outlook) -> list[str]:
    lines = [seen.out_of_memory] if seen.out_of_memory else []
    if seen.timed_steps:
        lines.append(
            f"{seen.step_ms:.3g} ms a step, the median of {seen.timed_steps} after the first: an indication and no "
            "benchmark"
        )
    elif seen.step_ms:
        lines.append(f"{seen.step_ms / 1e3:.3g} s for the first step, which warms up; no other was timed")
    if seen.peak_bytes and not seen.out_of_memory:
        where = f", in {_PHASES[seen.phase]}" if seen.phase else ""
        least = "" if seen.steady else "at least "
        lines.append(f"{least}{size(seen.peak_bytes)} of memory at the peak of a step{where}")
    if seen.checkpoint_bytes:
        lines.append(f"{size(seen.checkpoint_bytes)} on disk for a checkpoint")
    return lines
