"""What a step keeps in memory: bytes saved for backward, and the peak of a step on the CPU.

Knows: exact bytes of tensor storages. Refuses to know: process memory, fragmentation, and what
a CUDA or MPS allocator reserves (those have counters of their own). Units: bytes.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from precision_lab.probe.trace import leaves_no_trace

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that the graph of one forward holds until its backward.

    A storage counts once and whole, however many saved tensors view it or how small a part they
    use. `activations_bytes` leaves out parameters, buffers and what the caller excluded;
    `by_dtype` splits it by the dtype first saved from each storage. `weight_casts_bytes` are
    low-precision copies of parameters: they do not grow with the batch, and at a small batch
    they can outweigh what autocast saves.
    """

    activations_bytes: int
    weight_casts_bytes: int
    by_dtype: dict[str, int]


def saved_activations(
    model: nn.Module, forward: Callable[[], Tensor], exclude: Iterable[Tensor] = ()
) -> SavedActivations:
    """Run `forward` once, without a backward, and add up what autograd saved.

    `forward` takes nothing, opens and closes the arm's autocast itself (its weight cache holds
    casts while open) and returns the loss. `exclude` names tensors that exist anyway: the batch,
    as `forward` uses it, on the model's device. Leaves no trace, see `leaves_no_trace`.

    A low-precision copy of the batch does count: it is kept beside the batch.

    Unseen: sparse tensors, tensors that a custom Function keeps as attributes instead of saving
    them, and the inputs of checkpointed regions, which activation checkpointing keeps in a closure.
    """
    exclude = list(exclude)  # held, so that no storage of theirs can be replaced meanwhile
    casts = WeightCasts(model.parameters())
    kept_anyway = {storage_id(t) for t in (*model.parameters(), *model.buffers(), *exclude)} | {None}
    saved: dict[int, _SavedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_id(tensor)
        if key not in kept_anyway and key not in saved:
            saved[key] = _SavedStorage(tensor)
        return tensor

    with leaves_no_trace(model), torch.enable_grad(), casts:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward()
        # A branch whose result nobody used is gone by now, with all it had saved.
        alive = {key: storage for key, storage in saved.items() if not storage.ref.expired()}
        del loss

    by_dtype: dict[str, int] = {}
    for key, storage in alive.items():
        if key not in casts.copies:
            by_dtype[storage.dtype] = by_dtype.get(storage.dtype, 0) + storage.nbytes
    return SavedActivations(
        activations_bytes=sum(by_dtype.values()),
        weight_casts_bytes=sum(s.nbytes for key, s in alive.items() if key in casts.copies),
        by_dtype=by_dtype,
    )


@dataclass
class Block:
    """Memory that the CPU's allocator handed out during a step. Times in ns since 1970."""

    pointer: int
    nbytes: int
    born_ns: int
    freed_ns: float = math.inf  # until the end of the step: not freed


@dataclass(frozen=True)
class CpuPeak:
    """The peak of one step: made of what was alive before the step, and of `blocks` that the step was given."""

    nbytes: int
    at_ns: int  # when the last block was handed out that made it; 0 where the step allocated nothing
    blocks: list[Block]  # alive at that moment


def cpu_step_peak(step: Callable[[], None], alive: Iterable[Tensor]) -> CpuPeak:
    """Peak of allocated CPU memory while `step` runs once, by the allocator's own events.

    `alive` names what exists at the start: parameters, buffers, optimizer state, batch, and
    gradients unless they are None (distinct storages are added up, tensors on other devices
    ignored). Kernel scratch from torch's allocator is included; what a library allocates for
    itself, and allocations on threads other than the step's and autograd's, are not.

    The allocator reports no free of memory older than the profile, so what is in `alive` counts
    during the whole step, even if the step drops it; torch then also prints one warning. Start
    with gradients None to have the exact figure.
    """
    # Read when kineto first starts in a process, after the import of torch: early enough here.
    # 6 is above ERROR: without a GPU kineto reports "gpuGetDeviceCount failed" as an error (2.14.1).
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    on_cpu = (t for t in alive if t.device.type == "cpu")
    storages = {storage_id(t): t.untyped_storage() for t in on_cpu}  # holds each until the end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step()
    allocated = peak = sum(storage.nbytes() for storage in storages.values())
    at_ns = 0
    live: dict[int, Block] = {}  # by address, of what the step itself allocated
    blocks: list[Block] = []
    for event in sorted(_allocations(prof), key=lambda event: event.start_time_ns):
        pointer, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if nbytes > 0:
            live[pointer] = Block(pointer, nbytes, event.start_time_ns)
            blocks.append(live[pointer])
            allocated += nbytes
            if allocated > peak:
                peak, at_ns = allocated, event.start_time_ns
        # The allocator's table may remember an address from an earlier profile, with the
        # size it had then: a free that this step's allocations do not explain is not counted.
        elif block := live.pop(pointer, None):
            allocated -= block.nbytes
            block.freed_ns = event.start_time_ns
    return CpuPeak(peak, at_ns, [block for block in blocks if block.born_ns <= at_ns < block.freed_ns])


def _allocations(prof: profile) -> Iterator:
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event


class _SavedStorage:
    """A saved storage, by weak reference: it lives no longer for being counted.

    While the reference exists the address of the storage object is not given to another one, so
    it is an identity; the address of the data is not, it is reused after a free.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.ref = StorageWeakRef(storage)
        self.nbytes = storage.nbytes()
        self.dtype = str(tensor.dtype).removeprefix("torch.")


class WeightCasts(TorchDispatchMode):
    """Finds casts of parameters below autocast, by storage: also of views and transposes."""

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = {storage_id(parameter) for parameter in parameters} - {None}
        self.copies: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            source, dtype_changed = storage_id(args[0]), result.dtype != args[0].dtype
            # A copy of a cast (another memory format, say) is still a cast of the weight.
            if source in self.copies or (source in self._parameters and dtype_changed):
                storage = result.untyped_storage()
                self.copies[storage._cdata] = StorageWeakRef(storage)
        return result


def storage_id(tensor: Tensor) -> int | None:
    """The storage object's address: an identity while the storage lives. None for sparse tensors."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
