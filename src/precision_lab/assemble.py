"""From a typed config to things ready to train: device checked, label proved, workload built."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from precision_lab import config, hardware, targets
from precision_lab.batches import TrainBatches, place_on
from precision_lab.config import Config, TrainerConfig
from precision_lab.errors import InputError
from precision_lab.optim import build_optimizer, check_schedule
from precision_lab.precision import Policy
from precision_lab.seeds import derive
from precision_lab.task import Workload, build
from precision_lab.trainer import Trainer


@dataclass(frozen=True)
class Resolved:
    """What was asked of this machine, with `auto` resolved, and found possible. Nothing is built yet."""

    asked: Config
    device: torch.device
    support: dict[str, str]
    emulated: list[str]  # dtypes that the arm uses and the device has no units for
    notes: list[str]  # lines for the reader: the machine, what auto chose


@dataclass(frozen=True)
class Assembly:
    """What was asked and all that it takes to do it. Nothing is written yet."""

    asked: Config
    policy: Policy
    workload: Workload
    place: Callable[[Any], Any]  # moves a batch to the device
    flags: dict[str, Any]  # backend flags as they read once set
    proof: dict[str, Any]  # what was measured to execute
    total_steps: int
    notes: list[str]  # lines for the reader: what is emulated, and how slowly


def resolve(asked: Config) -> Resolved:
    """Refuse what this machine cannot do (InputError), and choose where it was left to choose."""
    device = hardware.select_device(asked.device)
    support = hardware.dtype_support(device)
    notes = [hardware.describe(device, support)]
    if asked.precision.name == "auto":
        arm, reason = hardware.choose_precision(device, support)
        asked = replace(asked, precision=config.load_precision(arm))
        notes.append(f"precision=auto: {arm}, since {reason}")
    emulated = hardware.check_support(asked.precision, device, support)
    return Resolved(asked, device, support, emulated, notes)


def assemble(resolved: Resolved) -> Assembly:
    """Build the workload and prove the arm's label. Raises InputError, or LabelError from the proof."""
    asked, device = resolved.asked, resolved.device
    notes = [_emulation_note(name, device) for name in resolved.emulated]
    policy = Policy(asked.precision, device)
    flags = policy.apply_backends()
    proof = policy.prove()
    place = place_on(device, asked.device.channels_last)
    workload = build(asked)
    steps = _total_steps(asked.trainer, len(workload.data.train))
    return Assembly(asked, policy, workload, place, flags, proof, steps, notes)


def _total_steps(plan: TrainerConfig, samples: int) -> int:
    if plan.steps:
        return plan.steps
    steps = plan.epochs * (samples // plan.batch_size) // plan.accumulation
    if steps == 0:
        raise InputError(
            f"trainer.epochs={plan.epochs} of {samples} samples holds no step of {plan.accumulation} micro-batches "
            f"of {plan.batch_size}; set a smaller trainer.batch_size or trainer.accumulation, or more epochs."
        )
    return steps


def _emulation_note(name: str, device: torch.device) -> str:
    ratio = hardware.slowdown(getattr(torch, name), device)
    return (
        f"{name} has no units of its own here: a 256 x 256 matmul was measured just now to take "
        f"{ratio:.3g} times as long as in float32. Expect no gain in speed."
    )


def training_batches(ready: Assembly) -> TrainBatches:
    """The run's batches from the first on: in every arm the same for a seed."""
    plan = ready.asked.trainer
    seed = derive(ready.asked.seed, "order")
    return TrainBatches(ready.workload.data.train, plan.batch_size, seed, ready.place, plan.workers)


def make_trainer(ready: Assembly) -> Trainer:
    """Move the model to the device, give it the arm's dtypes, and build its optimizer. Once."""
    asked, policy = ready.asked, ready.policy
    memory_format = torch.channels_last if asked.device.channels_last else torch.preserve_format
    try:
        model = ready.workload.model.to(policy.device, memory_format=memory_format)
    except RuntimeError as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise InputError(
            f"The model alone does not fit into the memory of this {policy.device.type} device."
        ) from error
    policy.prepare(model)
    optimizer = build_optimizer(asked.optimizer, model)
    if asked.device.compile:
        model = torch.compile(model)
    schedule = targets.bind("scheduler", asked.scheduler)
    check_schedule(schedule, ready.total_steps)
    return Trainer(asked.trainer, policy, ready.workload.task, model, optimizer, schedule)
