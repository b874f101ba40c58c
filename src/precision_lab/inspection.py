"""One training step looked at: operation by operation, or for the memory it takes."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from precision_lab import hardware, identity
from precision_lab.assemble import assemble, make_trainer, resolve, training_batches
from precision_lab.config import Config
from precision_lab.errors import InputError
from precision_lab.probe.memory import cpu_step_peak_bytes, saved_activations
from precision_lab.probe.ops import op_map, render
from precision_lab.trainer import Trainer


def inspect_step(asked: Config, by_module: bool, width: int) -> str:
    """The op map of the first training batch as text of at most `width` columns."""
    if asked.device.compile:
        raise InputError("A compiled model cannot be looked at operation by operation; drop device.compile=true.")
    resolved = resolve(asked)
    ready = assemble(resolved)
    trainer, batch = make_trainer(ready), next(training_batches(ready))
    trainer.model.train()
    rows = op_map(trainer.model, _forward(trainer, batch))
    title = f"{identity.arm_label(ready.asked.precision)} on {trainer.policy.device.type}, one training step"
    return "\n".join([*resolved.notes, *ready.notes, title, "", render(rows, by_module=by_module, width=width)])


def measure_memory(trainer: Trainer, batch: Any, compiled: bool) -> dict[str, float]:
    """Memory of one more step, by metric name. It trains: to be called after all that counts.

    Saved activations on every device; the peak on a CPU alone, from the allocator's events
    (elsewhere the allocator keeps its own peak).
    """
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    trainer.model.train()
    figures = {}
    if not compiled:  # a compiled model would run eagerly beneath the instrument, and keep something else
        saved = saved_activations(trainer.model, _forward(trainer, batch), exclude=inputs)
        figures["mem/saved_activations_mib"] = saved.activations_bytes / 2**20
        figures["mem/saved_weight_casts_mib"] = saved.weight_casts_bytes / 2**20
    if trainer.policy.device.type == "cpu":
        state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
        kept = [*trainer.model.parameters(), *trainer.model.buffers(), *state, *inputs]
        trainer.optimizer.zero_grad()
        alive = filter(torch.is_tensor, kept)
        peak = cpu_step_peak_bytes(lambda: trainer.step(itertools.repeat(batch)), alive)
        figures["mem/peak_allocated_gib"] = peak / hardware.GIB
    return figures


def _forward(trainer: Trainer, batch: Any) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with trainer.policy.autocast():
            return trainer.task(trainer.model, batch)[0]

    return forward
