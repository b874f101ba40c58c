"""From a typed config to things ready to train: device checked, label proved, workload built."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from precision_lab import config, hardware, open_sets, targets
from precision_lab.arm_schema import PrecisionConfig
from precision_lab.batches import TrainBatches, eval_batches, place_on
from precision_lab.checkpoint import load_weights
from precision_lab.config import Config, TrainerConfig
from precision_lab.datasets import Data, as_data
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.optim import build_optimizer, check_schedule
from precision_lab.precision import Policy, perturb
from precision_lab.seeds import derive, restore_generators, seed_globals
from precision_lab.task import Task
from precision_lab.trainer import Trainer


@dataclass(frozen=True)
class Resolved:
    """What was asked of this machine, with `auto` resolved, and found possible. Nothing is built yet."""

    asked: Config
    device: torch.device
    support: dict[str, str]
    emulated: list[str]  # dtypes that the arm uses and the device has no units for
    notes: list[str]  # lines for the reader: the machine, what auto chose


@dataclass
class Workload:
    """What is trained: the model with its seeded initial weights (on the CPU, float32), data and task."""

    model: nn.Module
    weights_hash: str  # of the initial weights, before any arm casts them
    data: Data
    task: Task


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

    @property
    def hashes(self) -> dict[str, str]:
        """Of what a run begins with."""
        return {"data": self.workload.data.hash, "initial_weights": self.workload.weights_hash}


def resolve(asked: Config) -> Resolved:
    """Refuse what this machine cannot do (InputError), and choose where it was left to choose."""
    device = hardware.select_device(asked.device)
    if asked.precision.emulate and device.type != "cpu":
        raise InputError(f"precision.emulate needs the CPU, and device=auto is {device.type} here; set device=cpu.")
    support = hardware.dtype_support(device)
    notes = [hardware.describe(device, support)]
    if asked.precision.name == "auto":
        arm, reason = hardware.choose_precision(device, support)
        asked = replace(asked, precision=config.load_precision(arm))
        notes.append(f"precision=auto: {arm}, since {reason}")
    emulated = hardware.check_support(asked.precision, device, support)
    return Resolved(asked, device, support, emulated, notes)


def assemble(resolved: Resolved, workload: Workload | None = None) -> Assembly:
    """Build the workload, if there is none, and prove the arm's label. InputError, or LabelError from the proof."""
    asked, device = resolved.asked, resolved.device
    notes = [_slowness_note(name, device) for name in resolved.emulated]
    if target := asked.precision.emulate:
        notes.append(_emulation_note(asked.precision, target.name))
    if asked.trainer.init_from:
        notes.append(f"initial weights from {asked.trainer.init_from}; optimizer, schedule and data begin anew")
    hardware.limit_memory(asked.device, device)
    policy = Policy(asked.precision, device)
    flags = policy.apply_backends()
    proof = policy.prove()
    place = place_on(device, asked.device.channels_last)
    workload = workload or build_workload(asked)
    steps = total_steps(asked.trainer, len(workload.data.train))
    return Assembly(asked, policy, workload, place, flags, proof, steps, notes)


def build_workload(asked: Config) -> Workload:
    """Build data, then the model on it, then the task. Weights depend on the run's seed, data does not."""
    locate_all(asked)
    data = build_data(dataset_of(asked))
    model = build_model(asked, data)
    return Workload(model, content_hash(model.state_dict()), data, targets.bind("task", asked.task))


def locate_all(asked: Config) -> None:
    """InputError for a class or function that does not exist: told before data is read."""
    for group in open_sets.NAMES:
        targets.locate(group, getattr(asked, group))


def dataset_of(asked: Config) -> dict[str, Any]:
    """The dataset's `_target_` and arguments, with what the model tells it."""
    return {
        key: asked.model.get(key) if value is None and key in open_sets.SHARED_FACTS else value
        for key, value in asked.dataset.items()
    }


def build_data(dataset: dict[str, Any]) -> Data:
    """Training and validation samples: both are there, and the first can be read."""
    seed_globals(0)  # for a dataset of the user's that draws: equal in all runs, or none were comparable
    return _checked_data(targets.instantiate("dataset", dataset))


def build_model(asked: Config, data: Data) -> nn.Module:
    """The model with its seeded initial weights, on the CPU in float32: equal each time it is built."""
    model_node = {
        key: data.facts.get(key) if value is None and key in open_sets.SHARED_FACTS else value
        for key, value in asked.model.items()
    }
    unknown = [key for key in open_sets.SHARED_FACTS if key in model_node and model_node[key] is None]
    if unknown:
        raise InputError(
            f"model.{unknown[0]} is null and dataset={open_sets.label(asked.dataset)} does not tell it; "
            f"set model.{unknown[0]}."
        )
    seed_globals(asked.seed)
    model = targets.instantiate("model", model_node)
    if not isinstance(model, nn.Module):
        raise InputError(f"model._target_={model_node['_target_']} built {type(model).__name__}, not an nn.Module.")
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise InputError(
            f"model._target_={model_node['_target_']} has lazy parameters, whose initial weights would depend on the "
            "first batch; give their sizes."
        )
    if asked.trainer.init_from:
        load_weights(model, Path(asked.trainer.init_from))
    return model


def _checked_data(made: Any) -> Data:
    try:
        data = as_data(made)
    except InputError:
        raise
    except Exception as error:  # a user's dataset can raise anything when it is read
        sentence = f"dataset: reading a sample raised {type(error).__name__}: {error}."
        raise targets.refusal(error, sentence) from error
    if not len(data.train) or not len(data.val):
        raise InputError(f"dataset: {len(data.train)} training and {len(data.val)} validation samples; both need some.")
    return data


def total_steps(plan: TrainerConfig, samples: int) -> int:
    """The steps that a plan comes to on so many training samples; InputError where that is none."""
    if plan.steps:
        return plan.steps
    steps = plan.epochs * (samples // plan.batch_size) // plan.accumulation
    if steps == 0:
        raise InputError(
            f"trainer.epochs={plan.epochs} of {samples} samples holds no step of {plan.accumulation} micro-batches "
            f"of {plan.batch_size}; set a smaller trainer.batch_size or trainer.accumulation, or more epochs."
        )
    return steps


def _emulation_note(precision: PrecisionConfig, target: str) -> str:
    low = (precision.autocast_dtype or precision.param_dtype).name
    what = f"the autocast policy of {target} and " if precision.autocast_dtype else ""
    return (
        f"emulated on this CPU: {what}{low} as the units of {target} round it, computed in float32. The time and "
        f"memory of this run say nothing about {target}."
    )


def _slowness_note(name: str, device: torch.device) -> str:
    ratio = hardware.slowdown(getattr(torch, name), device)
    return (
        f"{name} has no units of its own here: a 256 x 256 matmul was measured just now to take "
        f"{ratio:.3g} times as long as in float32. Expect no gain in speed."
    )


def training_batches(ready: Assembly, state: dict[str, Any] | None = None) -> TrainBatches:
    """The run's batches, from the first on or from a `TrainBatches.state`: in every arm the same for a seed."""
    plan, data = ready.asked.trainer, ready.workload.data.train
    seed = derive(ready.asked.seed, "order")
    return TrainBatches(data, plan.batch_size, seed, ready.place, plan.workers, _pins(ready), state)


def go_on_from(trainer: Trainer, ready: Assembly, state: dict[str, Any]) -> TrainBatches:
    """Bring the trainer and the global generators to where a checkpoint's state has them; return the batches to come.

    Raises anything where the state is damaged or another model's; then the trainer is of no use any more.
    """
    trainer.load_state(state["trainer"])
    batches = training_batches(ready, state["batches"])
    restore_generators(state["generators"], trainer.policy.device.type)
    return batches


def validation_batches(ready: Assembly) -> Iterator[tuple[Any, int]]:
    """One pass over the validation set: (batch, its number of samples)."""
    plan = ready.asked.trainer
    return eval_batches(ready.workload.data.val, plan.batch_size, ready.place, plan.workers, _pins(ready))


def _pins(ready: Assembly) -> bool:
    return ready.policy.device.type == "cuda"  # the one trained on: there may be one that is not


Parts = tuple[Assembly, Trainer, TrainBatches]


def build(resolved: Resolved) -> Parts:
    """All that it takes to train from the first step on. InputError, or LabelError, as `assemble` raises them."""
    ready = assemble(resolved)
    return ready, make_trainer(ready), training_batches(ready)


def make_trainer(ready: Assembly) -> Trainer:
    """Move the model to the device, give it the arm's dtypes, and build its optimizer. Once."""
    asked, policy = ready.asked, ready.policy
    memory_format = torch.channels_last if asked.device.channels_last else torch.preserve_format
    if asked.precision.weight_noise:
        perturb(ready.workload.model, asked.precision.weight_noise, derive(asked.seed, "weight_noise"))
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
