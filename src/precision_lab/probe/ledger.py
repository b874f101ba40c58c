"""What the peak of one training step is made of: the phase it sits in, and its bytes by kind.

Knows: every tensor storage that a step's operations touch, what it was for, and when. The peak itself is the
allocator's own, and what no tensor explains of it is the kernels' scratch. Refuses to know: what reserved memory
is for, and compiled models, which would run eagerly beneath the instrument. Units: bytes; times in ns since 1970.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from precision_lab.probe.memory import Block, WeightCasts, cpu_step_peak, storage_id

KINDS = (
    "parameters",  # and buffers
    "gradients",
    "optimizer_state",
    "saved_activations",
    "weight_casts",
    "batch",
    "temporaries",  # all other tensors
    "kernel_scratch",  # of the allocator's bytes, those that are in no tensor; rounding by the allocator, too
)
# What is kept from step to step or asked for by name; a kind further left goes before one further right.
_NAMED = ("parameters", "optimizer_state", "batch", "gradients")

Forward = Callable[..., Any]
Tensors = dict[str, list[Tensor]]


@dataclass(frozen=True)
class StepMemory:
    """The peak of one step. `by_kind` has a figure for each of KINDS, which add up to `peak_bytes`."""

    source: str  # allocator events | allocator counter | sampled
    phase: str  # forward | backward | optimizer
    peak_bytes: int
    by_kind: dict[str, int]


def step_memory(
    step: Callable[[Callable[[Forward], Forward]], None],
    tensors: Callable[[], Tensors],
    parameters: Iterable[nn.Parameter],
    device: torch.device,
) -> StepMemory:
    """Take one step and see what its peak of memory on `device` is made of. Start with gradients None.

    `step(watched)` takes the step, and passes what computes the loss through `watched`, by which forward is known
    from the rest. `tensors()` names those that have a kind of their own (parameters, optimizer_state, batch,
    gradients), and is asked before the step and after it. On a CPU the peak is from the allocator's events, exact
    to the byte; elsewhere from the allocator's own peak, read after each operation, or, where it keeps none, from
    the memory in use at those moments ("sampled").
    """
    if device.type == "cpu":
        return _by_events(step, tensors, parameters)
    source, count = allocator_counter(device)
    return by_counter(step, tensors, parameters, device, source, count)


def allocator_counter(device: torch.device) -> tuple[str, Callable[[], int]]:
    """Its name, and what reads the highest bytes since now; without such a counter, what reads those in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return "allocator counter", lambda: torch.cuda.max_memory_allocated(device)
    try:  # some answer that the device has no such counter, and some count nothing
        held = torch.empty(1024, device=device)
        counts = torch.accelerator.max_memory_allocated() > 0
        del held
        torch.accelerator.reset_peak_memory_stats()
    except (RuntimeError, NotImplementedError, AttributeError):
        counts = False
    if counts:
        return "allocator counter", torch.accelerator.max_memory_allocated
    return "sampled", torch.mps.current_allocated_memory


def by_counter(
    step: Callable[[Callable[[Forward], Forward]], None],
    tensors: Callable[[], Tensors],
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    source: str,
    count: Callable[[], int],
) -> StepMemory:
    """The same by a counter of the allocator's bytes, which only the host reads: it waits for no device."""
    ledger = Ledger(parameters, device, count)
    ledger.name(tensors())
    with ledger:
        step(ledger.watched)
    ledger.name(tensors())
    by_kind = ledger.by_kind(ledger.at_peak)
    by_kind["kernel_scratch"] = ledger.peak - sum(by_kind.values())
    return StepMemory(source, ledger.phase_at_peak, ledger.peak, by_kind)


def _by_events(
    step: Callable[[Callable[[Forward], Forward]], None],
    tensors: Callable[[], Tensors],
    parameters: Iterable[nn.Parameter],
) -> StepMemory:
    ledger = Ledger(parameters, torch.device("cpu"))
    before = tensors()
    ledger.name(before)
    there_before = ledger.by_kind(ledger.alive())

    def watched_step() -> None:
        with ledger:
            step(ledger.watched)

    peak = cpu_step_peak(watched_step, [tensor for named in before.values() for tensor in named])
    ledger.name(tensors())
    given = ledger.by_kind_of_blocks(peak.blocks)
    by_kind = {kind: there_before[kind] + given[kind] for kind in KINDS}
    return StepMemory("allocator events", ledger.phase_at(peak.at_ns), peak.nbytes, by_kind)


class _Record:
    """A storage: a weak reference, so that it lives no longer, and its address is given to no other one."""

    def __init__(self, storage: torch.UntypedStorage):
        self.ref, self.kind = StorageWeakRef(storage), "temporaries"
        self.note(storage)

    def note(self, storage: torch.UntypedStorage) -> None:
        self.pointer, self.nbytes, self.seen_ns = storage.data_ptr(), storage.nbytes(), time.time_ns()


class Ledger(WeightCasts):
    """A mode below autocast that keeps a record of each storage on `device` and of the phase the step is in.

    With a `count` of the allocator's bytes it keeps the highest, with the records alive and the phase then.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], device: torch.device, count: Callable[[], int] | None = None
    ) -> None:
        super().__init__(parameters)
        self._device, self._count = device, count
        self._records: dict[int, _Record] = {}  # by the storage object's address
        self._phases = [(0, "forward")]  # since when
        self.peak, self.at_peak, self.phase_at_peak = 0, [], "forward"

    def name(self, tensors: Tensors) -> None:
        """Give the storages of these tensors their kind; one that two name has the first of _NAMED."""
        for kind in reversed(_NAMED):
            for tensor in tensors.get(kind, []):
                if record := self._record(tensor):
                    record.kind = kind

    def watched(self, forward: Forward) -> Forward:
        """The same function, during which the phase is forward and what autograd saves is an activation."""

        def save(tensor: Tensor) -> Tensor:
            record = self._record(tensor)
            if record and record.kind == "temporaries":
                record.kind = "saved_activations"
            return tensor

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._enter("forward")
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return watched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._enter(self._phase_of_an_operation())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        if self._count and (now := self._count()) > self.peak:
            self.peak, self.phase_at_peak, self.at_peak = now, self._phases[-1][1], self.alive()
        return result

    def alive(self) -> list[_Record]:
        """The records of storages that exist now; the others are forgotten."""
        self._records = {key: record for key, record in self._records.items() if not record.ref.expired()}
        return list(self._records.values())

    def by_kind(self, records: Iterable[_Record]) -> dict[str, int]:
        """Bytes of these storages, for each kind."""
        total = dict.fromkeys(KINDS, 0)
        for record in records:
            total[self._kind(record)] += record.nbytes
        return total

    def by_kind_of_blocks(self, blocks: Iterable[Block]) -> Counter[str]:
        """Bytes of blocks, each of the kind of the storage seen in it while it was handed out; else scratch."""
        tenants: dict[int, list[_Record]] = {}
        for record in self._records.values():
            tenants.setdefault(record.pointer, []).append(record)
        total: Counter[str] = Counter()
        for block in blocks:
            here = (r for r in tenants.get(block.pointer, []) if block.born_ns <= r.seen_ns < block.freed_ns)
            record = next(here, None)
            total[self._kind(record) if record else "kernel_scratch"] += block.nbytes
        return total

    def phase_at(self, moment_ns: int) -> str:
        """The phase that the step was in at that time."""
        return self._phases[max(0, bisect_right(self._phases, moment_ns, key=lambda entry: entry[0]) - 1)][1]

    def _kind(self, record: _Record) -> str:
        cast = record.ref.cdata in self.copies and record.kind not in _NAMED
        return "weight_casts" if cast else record.kind

    def _record(self, tensor: Tensor) -> _Record | None:
        """The record of a tensor's storage, as it is now; None for one elsewhere, or without bytes."""
        key = storage_id(tensor) if tensor.device.type == self._device.type else None
        if key is None or not tensor.untyped_storage().nbytes():
            return None
        storage = tensor.untyped_storage()
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(storage)
        elif record.pointer != storage.data_ptr():  # an operation gave it another size
            record.note(storage)
        return record

    def _phase_of_an_operation(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        phase = self._phases[-1][1]
        return "optimizer" if phase == "backward" else phase

    def _enter(self, phase: str) -> None:
        if self._phases[-1][1] != phase:
            self._phases.append((time.time_ns(), phase))
