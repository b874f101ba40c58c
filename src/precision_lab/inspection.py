"""One training step looked at for the memory it takes, and what is measured once a training is over."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precision_lab.assemble import Assembly, Resolved, training_batches
from precision_lab.checkpoint import model_state
from precision_lab.config import Extra
from precision_lab.logs import log
from precision_lab.nested import tensors_in
from precision_lab.op_maps import COLUMNS, rows_of_a_step, table_rows
from precision_lab.probe.ledger import StepMemory, step_memory
from precision_lab.probe.memory import cpu_step_peak, saved_activations, storage_id
from precision_lab.recorder import write_whole
from precision_lab.sizes import GIB, MIB
from precision_lab.task import Task
from precision_lab.trainer import Trainer


def measure_afterwards(
    trainer: Trainer, ready: Assembly, resolved: Resolved, folder: Path, found: dict[str, float | None]
) -> dict[str, Any] | None:
    """Put the figures of memory into `found`, keep the op map in `folder` if it is wanted, return the peak by kind.

    It trains: to be called after all that counts. The run is complete without it: what fails is a warning.
    """
    asked, what, by_kind = ready.asked, "memory", None
    wants_op_map = Extra.op_map in asked.wandb.extras
    if not (asked.probe.memory or wants_op_map):
        return None
    try:
        batch = next(training_batches(ready))
        if asked.probe.memory:
            found |= measure_memory(trainer, batch, asked.device.compile)
            by_kind = None if asked.device.compile else peak_by_kind(trainer, batch)
        if wants_op_map:
            what = "the op map"
            _keep_op_map(trainer, batch, resolved, folder)
    except Exception as error:
        log.warning("%s could not be measured: %s: %s", what, type(error).__name__, str(error).split("\n")[0])
    return by_kind


def _keep_op_map(trainer: Trainer, batch: Any, resolved: Resolved, folder: Path) -> None:
    """As the table that W&B gets of it: `probe/op_map.json`."""
    emulate = resolved.asked.precision.emulate
    target, kind = (emulate.name, "predicted") if emulate else (trainer.policy.device.type, "real")
    rows = table_rows(target, kind, rows_of_a_step(trainer, batch, resolved, target))
    (folder / "probe").mkdir(exist_ok=True)
    write_whole(folder / "probe" / "op_map.json", json.dumps({"columns": COLUMNS, "rows": rows}) + "\n")


def measure_memory(trainer: Trainer, batch: Any, compiled: bool) -> dict[str, float]:
    """Memory of one more step, by metric name. It trains: to be called after all that counts.

    Saved activations on every device; the peak on a CPU alone, from the allocator's events
    (elsewhere the allocator keeps its own peak).
    """
    trainer.model.train()
    figures = {}
    if not compiled:  # a compiled model would run eagerly beneath the instrument, and keep something else
        saved = saved_activations(trainer.model, _forward(trainer, batch), exclude=tensors_in(batch))
        figures["mem/saved_activations_mib"] = saved.activations_bytes / MIB
        figures["mem/saved_weight_casts_mib"] = saved.weight_casts_bytes / MIB
    if trainer.policy.device.type == "cpu":
        figures["mem/peak_allocated_gib"] = step_peak(trainer, batch) / GIB
    return figures


def step_peak(trainer: Trainer, batch: Any) -> int:
    """Bytes of the allocator's peak in one more step, on a CPU or on CUDA, gradients none at its start. It trains."""
    trainer.optimizer.zero_grad()
    if trainer.policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.step(itertools.repeat(batch))
        return torch.cuda.max_memory_allocated()
    alive = itertools.chain(*_by_kind(trainer, batch).values())
    return cpu_step_peak(lambda: trainer.step(itertools.repeat(batch)), alive).nbytes


def peak_by_kind(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """What the peak of one more step is made of, in bytes, as result.json keeps it; see `step_memory`.

    On CUDA also the most that the allocator held from the device in that step, and what of the device's memory
    is in use now, by whatever process. It trains: to be called after all that counts. Not for a compiled model.
    """
    trainer.model.train()
    found = measured_step(trainer, itertools.repeat(batch))
    part = {"batch_size": trainer.plan.batch_size, **dataclasses.asdict(found)}
    if trainer.policy.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        part |= {"reserved_bytes": torch.cuda.max_memory_reserved(), "device_used_bytes": total - free}
    return part


def measured_step(trainer: Trainer, batches: Iterator[Any]) -> StepMemory:
    """Take the next step on `batches` and see its peak of memory. The step is the same to the bit as without.

    Not for a compiled model.
    """
    trainer.optimizer.zero_grad()  # as the step does first: what it frees counts for the whole step
    batch = next(batches)  # out here: workers that a loader forks within a profile would record, too, and for ever
    task = trainer.task

    def step(watched: Callable[[Task], Task]) -> None:
        trainer.task = watched(task)
        try:
            trainer.step(itertools.chain([batch], batches))
        finally:
            trainer.task = task

    device = trainer.policy.device
    return step_memory(step, lambda: _by_kind(trainer, batch), trainer.model.parameters(), device)


def checkpoint_bytes(trainer: Trainer) -> int:
    """Bytes of all that training keeps from step to step: parameters, buffers, optimizer state. Shared ones once."""
    kept = tensors_in([model_state(trainer.model), *trainer.optimizer.state.values()])
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in kept}.values())


def _by_kind(trainer: Trainer, batch: Any) -> dict[str, list[Tensor]]:
    """The tensors of a trainer that are there between two steps."""
    model = trainer.model
    return {
        "parameters": [*model.parameters(), *model.buffers()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer_state": tensors_in(list(trainer.optimizer.state.values())),
        "batch": tensors_in(batch),
    }


def _forward(trainer: Trainer, batch: Any) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with trainer.policy.arithmetic(), trainer.policy.autocast():
            return trainer.task(trainer.model, batch)[0]

    return forward
