"""The largest batch that each arm can train in a budget of memory: one fresh process an arm, real training steps.

Knows: how to search a size whose cost grows with it. On a CPU the budget is compared with the peak of one step by
torch's allocator, and nobody enforces it; on CUDA the allocator itself refuses what goes beyond. Refuses to know:
time. Batches are counted in samples of one micro-batch; GiB = 2^30 and MiB = 2^20 bytes.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from precision_lab.config import Config
from precision_lab.errors import InputError, require
from precision_lab.processes import Killed, ask
from precision_lab.settings import LargestBatchConfig
from precision_lab.sizes import GIB, size, unit
from precision_lab.sweep.survey import survey

WITHIN = 0.02  # of the largest batch: where the search stops
_MEANING = {
    "cpu": "Memory of one training step by the allocator of torch: {budget}. The process itself, and what libraries "
    "allocate for themselves, come on top; the operating system enforces no such budget.",
    "cuda": "Memory of the CUDA device: {budget}. A size that does not fit is one that ran out of memory; the CUDA "
    "context comes on top of what the allocator holds.",
}


@dataclass(frozen=True)
class Largest:
    """What the search found."""

    batch: int  # the largest that fits; 0 where not even one sample does
    beyond: int  # one that does not fit: larger by at most WITHIN, or by one sample
    beyond_peak: int | None  # bytes that it takes; None where memory ran out
    memory: dict[str, Any] | None  # peak of a step at `batch` by kind, as in result.json; None if finding it ran out
    samples: int  # of the training set


def search(peak: Callable[[int], int | None], budget: int | None) -> tuple[int, int]:
    """(the largest size found to fit, one not to fit), apart by WITHIN or one; (0, 1) if a size of 1 does not fit.

    `peak(size)` gives the bytes that a size takes, or None where memory ran out; a size fits if it takes at most
    `budget` bytes, where there is one. Both sizes have been tried.
    """
    known: dict[int, int | None] = {0: None}

    def fits(size: int) -> bool:
        known[size] = peak(size)
        return known[size] is not None and (budget is None or known[size] <= budget)

    low, size = 0, 2  # not 1: batch norm may refuse to train on one sample
    while fits(size):
        before, low, size = low, size, 2 * size
        growth = known[low] - known[before] if known[before] else 0
        if budget is not None and growth > 0:
            # just beyond the budget, which may be close to all the memory there is
            affordable = low + (budget - known[low]) * (low - before) / growth
            size = max(low + 1, min(size, math.ceil((1 + WITHIN / 2) * affordable)))
    high = size
    if not low:
        return (1, 2) if fits(1) else (0, 1)
    while high - low > max(1, WITHIN * low):
        middle = _between(low, high, known, budget)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def _between(low: int, high: int, known: dict[int, int | None], budget: int | None) -> int:
    """Just below where a straight line meets the budget, if that is well inside; else the middle."""
    if budget is not None and known[high] is not None:
        meets = low + (high - low) * (budget - known[low]) / (known[high] - known[low])
        close = int((1 - WITHIN / 4) * meets)
        if low + WITHIN / 4 * low < close < high:
            return close
    return (low + high) // 2


# --- all arms ------------------------------------------------------------------------------------------------


def find_largest(arms: dict[str, Config], settings: LargestBatchConfig, console: Console) -> None:
    """Search arm by arm and print the table. Raises InputError, or Ended where a search failed and said so.

    `console` is to take text as it stands: an arm's label has brackets.
    """
    for asked in arms.values():
        require(
            not asked.device.compile,
            "The memory of a compiled model is not measured operation by operation; drop device.compile=true.",
        )
    answers = survey(list(arms.values()))
    if refused := next((answer.refused for answer in answers if answer.refused), None):
        raise InputError(refused)
    device = answers[0].device
    require(device in _MEANING, f"The largest batch is not searched for on {device}, where no step's peak is known.")
    budget = _budget_on(device, settings.budget_gib)
    shown = size(budget) if budget else "all that is free"
    console.print(_MEANING[device].format(budget=shown) + "\n")
    found = {}
    for label, asked in arms.items():
        with console.status(f"{label}: trying batches"):
            found[label] = _largest_of(label, asked, budget)
        if not found[label].batch:
            needs = found[label].beyond_peak
            takes = f"which takes {size(needs)}" if needs else "where memory runs out"
            raise InputError(f"{shown} is too small for {label} at a batch of 1, {takes}; set a larger budget_gib.")
    console.print(_table(found, settings.reference))
    samples = min(one.samples for one in found.values())
    if any(one.batch > samples for one in found.values()):
        console.print(
            f"The training set has {samples:,} samples, the largest trainer.batch_size that train.py takes; larger "
            "batches were filled by taking samples again."
        )


def _budget_on(device: str, asked_gib: float | None) -> int | None:
    """Bytes; None for all of a CUDA device."""
    budget = None if asked_gib is None else int(asked_gib * GIB)
    if device != "cpu":
        return budget
    from precision_lab import hardware  # brings torch

    available = hardware.available_memory()
    require(bool(budget or available), "How much memory is available here is not known; set budget_gib.")
    require(
        not budget or not available or budget <= available,
        f"budget_gib={asked_gib} is more than the {(available or 0) / GIB:.3g} GiB of memory available here.",
    )
    return budget or available // 2


def _largest_of(label: str, asked: Config, budget: int | None) -> Largest:
    try:
        return Largest(**ask(f"{__name__}:look", (asked, budget)))
    except Killed as end:
        raise InputError(
            f"{label}: the search was killed by signal {end.number}, perhaps for want of memory; set a smaller "
            "budget_gib."
        ) from end


def _table(found: dict[str, Largest], reference: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold", min_width=8)
    name, one_unit = unit(max((one.memory["peak_bytes"] for one in found.values() if one.memory), default=0))
    for header in ("largest", "ratio", f"peak {name}"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("mostly", overflow="fold")
    table.add_column("too large", justify="right", no_wrap=True)
    base = found.get(reference)
    for label, one in found.items():
        table.add_row(
            label,
            f"{one.batch:,}",
            f"{one.batch / base.batch:.2f}" if base else "-",
            *(_peak(one.memory, one_unit) if one.memory else ("-", "-", "-")),
            f"{one.beyond:,}",
        )
    return table


def _peak(memory: dict[str, Any], one_unit: int) -> tuple[str, str, str]:
    """The peak in units of so many bytes, its phase, and what it mostly consists of."""
    kind, nbytes = max(memory["by_kind"].items(), key=lambda item: item[1])
    share = f"{kind.replace('_', ' ')} {nbytes / memory['peak_bytes']:.0%}"
    return f"{memory['peak_bytes'] / one_unit:.4g}", memory["phase"], share


# --- one arm, in its process ---------------------------------------------------------------------------------


def look(order: tuple[Config, int | None]) -> dict[str, Any]:
    """Search for one arm within a budget of bytes; a `Largest` as a dict."""
    asked, budget = order

    from precision_lab import fitting, hardware
    from precision_lab.assemble import assemble, make_trainer, resolve
    from precision_lab.inspection import peak_by_kind

    resolved = resolve(asked)
    enforced = resolved.device.type == "cuda"
    ready = assemble(resolved)
    if enforced and budget:
        share = hardware.fraction_of(resolved.device, budget, f"budget_gib={budget / GIB:.4g}")
        hardware.hold_to_fraction(resolved.device, share)
    trainer = make_trainer(ready)
    peaks: dict[int, int | None] = {}

    def peak(samples: int) -> int | None:
        peaks[samples] = fitting.peak_at(trainer, ready, samples)
        return peaks[samples]

    trainer.model.train()
    batch, beyond = search(peak, None if enforced else budget)
    memory = fitting.tried(peak_by_kind, trainer, ready, batch) if batch else None
    return dataclasses.asdict(Largest(batch, beyond, peaks[beyond], memory, len(ready.workload.data.train)))
