"""One step of a finished run again, exactly: the same weights, batches and random states, looked at module by module.

Goes from the nearest checkpoint, or from the start, which seeds make anew. What happened on the way is compared with
what the run recorded, so that a replay on another machine or with other code is told from the real thing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from precision_lab import hardware
from precision_lab.assemble import Parts, Resolved, build, go_on_from, resolve
from precision_lab.batches import TrainBatches
from precision_lab.checkpoint import step_of, uncompiled, written_in
from precision_lab.code import code_of
from precision_lab.config import Config, DeviceType
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.folders import read_json, read_status
from precision_lab.loading import WorkerDied
from precision_lab.resume import about, changes, go_on
from precision_lab.run_folder import log_points
from precision_lab.seeds import derive, seed_globals
from precision_lab.targets import raised
from precision_lab.trainer import Trainer


@dataclass
class Look:
    """What one step was like."""

    step: int  # from 1
    lr: float
    losses: list[float]  # of its micro-batches
    grad_norm: float  # before clipping, after unscaling
    loss_scale: float  # that its backward ran with
    skipped: bool
    indices: list[list[int]]  # of its training samples, a list for each micro-batch
    found: list[str] = field(default_factory=list)  # non-finite values in the order in which they came to be

    @property
    def nonfinite(self) -> bool:
        return self.skipped or not all(map(math.isfinite, self.losses))


@dataclass(frozen=True)
class Replay:
    """A step looked at, and how it was reached."""

    asked: Config
    look: Look
    began: int  # steps done where it began; 0: at the start
    compared: int  # log points on the way, with what the run recorded
    differs_from: int | None  # the step of the first of them whose loss is another one
    notes: list[str]


def replay(folder: Path, asked: Config, first: int, last: int) -> Replay:
    """Take the run's steps again up to the first of `first` to `last` that is not finite, or up to `last`.

    `asked` is the run's own config. InputError where there is no such step, or the run cannot be taken up here, or a
    step raises.
    """
    resolved = resolve(_as_it_was(folder, asked))
    ready, trainer, batches, notes = _taken_up(folder, resolved, first)
    if not first <= last <= ready.total_steps:
        raise InputError(f"step={last} is beyond the end of the run, which has {ready.total_steps} steps.")
    notes = [*resolved.notes, *_how_it_ended(folder, first), *notes]
    recorded = {line["train/step"]: line.get("train/loss") for line in log_points(folder)}
    began, compared, differs_from = trainer.done, 0, None
    trainer.model.train()
    while True:
        at = trainer.done + 1
        try:
            look = _take(trainer, batches, ready.total_steps, looked_at=at >= first)
        except Exception as error:
            if isinstance(error, InputError):
                raise
            told = str(error) if isinstance(error, WorkerDied) else raised(f"Step {at}", error)
            raise InputError(told) from error
        if at in recorded:
            loss = trainer.read_window()["train/loss"]
            compared += 1
            same = recorded[at] == loss or (recorded[at] is None and not math.isfinite(loss))
            differs_from = differs_from or (None if same else at)
        if look and (look.nonfinite or at == last):
            return Replay(ready.asked, look, began, compared, differs_from, notes)


def _as_it_was(folder: Path, asked: Config) -> Config:
    """The config with the device that `auto` stood for, and its threads."""
    made_on = _part(read_json(folder / "environment.json"), "fingerprint")
    kind, threads = made_on.get("device"), made_on.get("threads")
    device = asked.device
    if isinstance(kind, str) and kind in DeviceType.__members__:
        device = replace(device, type=DeviceType[kind])
    if kind == "cpu" and isinstance(threads, int):
        device = replace(device, threads=threads)
    return replace(asked, device=device)


def _taken_up(folder: Path, resolved: Resolved, step: int) -> tuple[*Parts, list[str]]:
    """All that it takes to go on from the last checkpoint before the step that can be used, or from the start."""
    parts = list(_at_the_start(resolved))
    environment = environment_of(resolved.device) | {"code": code_of(resolved.asked)}
    now = about(resolved.asked, environment, [], parts[0].hashes)
    paths, notes = [path for path in written_in(folder) if step_of(path) < step], []

    def load(state: dict[str, Any]) -> None:
        parts[2] = go_on_from(parts[1], parts[0], state)

    def begin_anew() -> None:
        parts.clear()
        hardware.release_memory()
        parts.extend(_at_the_start(resolved))

    try:
        if paths:
            _, differ, problems = go_on(folder, now, paths, load, begin_anew)
            return *parts, [*differ, *problems]
    except InputError as error:
        notes.append(f"no checkpoint can be used: {error}")
    was = read_json(folder / "environment.json")
    then = {key: _part(was, key) for key in ("fingerprint", "code")}
    notes += changes({**then, "torch": _part(was, "versions").get("torch")}, now) if all(then.values()) else []
    return *parts, notes


def _at_the_start(resolved: Resolved) -> Parts:
    parts = build(resolved)
    seed_globals(derive(resolved.asked.seed, "dropout"))
    return parts


def _how_it_ended(folder: Path, step: int) -> list[str]:
    told = read_status(folder)
    reason = f" ({told['reason']})" if told.get("reason") else ""
    past = isinstance(told.get("step"), int) and told["step"] < step
    return [f"the run itself ended after step {told['step']}, {told.get('status')}{reason}"] if past else []


def _part(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _take(trainer: Trainer, batches: TrainBatches, total_steps: int, looked_at: bool) -> Look | None:
    """One step; what it was like if it is to be `looked_at`, which waits for the device."""
    lr = trainer.rate.set(trainer.done, total_steps)
    if not looked_at:
        trainer.step(batches)
        trainer.done += 1
        return None
    scale, indices, found = trainer.scaler.get_scale(), [], []

    def note(words: str) -> None:
        which = f"in batch {len(indices)}, " if trainer.plan.accumulation > 1 else ""
        found.append(f"{which}{words}")

    def noted() -> Iterator[Any]:
        for batch in batches:
            indices.append(batches.indices)
            for words in _of_a_batch(batch):
                note(words)
            yield batch

    model = trainer.model
    trainer.model = uncompiled(model)  # a compiled one has no modules to look at
    try:
        with _watching(trainer.model, note):
            trainer.step(noted())
    finally:
        trainer.model = model
    trainer.done += 1
    losses, norm, skipped = trainer.window.last(trainer.plan.accumulation)
    if skipped and not found:
        found += _of_gradients(trainer.model)
    return Look(trainer.done, lr, losses, norm, scale, skipped, indices, found)


def _of_a_batch(batch: Any) -> list[str]:
    bad = [_nonfinite(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [f"the batch itself: {words}" for words in bad if words]


def _of_gradients(model: nn.Module) -> list[str]:
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return [f"the gradient of {name}: {words}" for name, grad in reversed(named) if (words := _nonfinite(grad))]


@contextmanager
def _watching(model: nn.Module, note: Callable[[str], None]) -> Iterator[None]:
    """Note each module whose output, or the gradient of whose output, is not finite, in the order it comes to be."""

    def shown(name: str, module: nn.Module) -> str:
        return f"{name or 'the whole model'} ({type(module).__name__})"

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor):
                continue
            if words := _nonfinite(leaf):
                note(f"the output of {shown(name, module)}: {words}{_largest(inputs)}")
            if leaf.requires_grad:
                leaf.register_hook(lambda grad: backward(name, module, grad))

    def backward(name: str, module: nn.Module, grad: Tensor) -> None:
        if words := _nonfinite(grad):
            note(f"the gradient at the output of {shown(name, module)}: {words}")

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: after(name, module, inputs, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nonfinite(tensor: Tensor) -> str:
    """`3 inf and 1 nan of 4,096 values in float16`; empty if all are finite."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        return ""
    infinite, nans = int(tensor.isinf().sum()), int(tensor.isnan().sum())
    if not infinite + nans:
        return ""
    kinds = [f"{count:,} {word}" for count, word in ((infinite, "inf"), (nans, "nan")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel():,} values in {str(tensor.dtype).removeprefix('torch.')}"


def _largest(inputs: Any) -> str:
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    largest = [float(leaf.detach().abs().max()) for leaf in leaves if leaf.numel()]
    return f"; the largest of its inputs is {max(largest):.4g}" if largest else ""


# --- in words -------------------------------------------------------------------------------------------------


def lines(done: Replay, title: str) -> list[str]:
    """What was replayed, how truly, and what the step was like."""
    look = done.look
    start = f"from the checkpoint after step {done.began}" if done.began else "from the start"
    truth = "no log point of the run lies on the way"
    if done.differs_from:
        truth = f"not as it was: the loss at step {done.differs_from} is not the one that the run recorded"
    elif done.compared:
        truth = f"at every log point on the way ({done.compared}) the loss equals the recorded one bit for bit"
    losses = ", ".join(f"{loss:.6g}" for loss in look.losses)
    rows = {
        "loss": losses if len(look.losses) == 1 else f"{losses} (of its micro-batches)",
        "grad norm": f"{look.grad_norm:.6g}, before clipping",
        "loss scale": f"{look.loss_scale:,g}",
        "rate": f"{look.lr:.4g}",
        "update": "skipped" if look.skipped else "applied",
    }
    for number, indices in enumerate(look.indices, 1):
        name = "batch" if len(look.indices) == 1 else f"batch {number}"
        rows[name] = f"training samples {', '.join(map(str, indices))}"
    body = [f"  {name:<11}{value}" for name, value in rows.items()]
    if look.found:
        more = look.found[1:4]
        body += ["", f"First non-finite: {look.found[0]}."]
        body += [f"then {item}" for item in more]
        left = len(look.found) - 1 - len(more)
        body += [f"and {left} more"] if left else []
    elif look.nonfinite:
        body += ["", "No module's output and no gradient at one is non-finite: the loss itself is, or what forms it."]
    else:
        body += ["", "All of it is finite."]
    return [title, *done.notes, f"replayed {start}; {truth}", "", f"step {look.step}", *body]
