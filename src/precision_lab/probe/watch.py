"""What a run's numbers would become in float16 and in bfloat16, watched while it trains in any precision.

After every so many steps the run's first training batch goes forward and backward once more, in float32 and with the
weights as they are then. What is seen in it is a prediction for the formats, not what the arm computes. It is outside
the clock and leaves no trace.

Each such step is one line of `probe/ranges.jsonl` in the run's folder:

    schema          1
    step            after which, from 1
    loss            of the float32 pass
    loss_scale      that `..._scaled` is multiplied by: a float16 arm's own, else precision.init_scale
    metrics         what metrics.jsonl gets at this step's log point, or at the next one
    scale_window    `lowest` to `highest` loss scale, powers of two, that makes no gradient overflow in float16 and
                    flushes less than 0.1 % of the nonzero activation gradients, and of the weight gradients, to zero
                    (lowest null: nothing limits it); `limited_below_by`, `limited_above_by`: [module, quantity];
                    `avoids_both`: whether there is such a scale. null without gradients
    lost_updates    see below, of all modules; null where the step was skipped
    modules         by name: `type`, `updates` (as lost_updates) and the quantities

A quantity has `values`, `nonfinite` and `nonzero` (counts; nonzero ones are finite), `amax` (the largest finite
magnitude), and for `float16` and `bfloat16` `headroom` (amax / largest finite number of the format) and the shares of
the nonzero values that would `overflow`, be `flushed` to zero or become `subnormal`. Quantities are `activation` (what
the module returns; stands once, at the innermost module that returns it), `activation_gradient`, `weight_gradient`,
both also with `_scaled` behind, `buffer.<name>` and `optimizer_state.<name>`. Gradients are of loss / accumulation.

Lost updates: `asked` counts weights with a nonzero gradient, `lost` is the share of them that the arm's step left
unchanged. With float32 weights `moved` counts those that did change, and `lost_float16`, `lost_bfloat16` is the share
of them that would not have if weights were held in that format: round(round(w) + update) = round(w).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from precision_lab import hardware
from precision_lab.config import TrainerConfig
from precision_lab.logs import log
from precision_lab.nested import map_tensors
from precision_lab.precision import Policy
from precision_lab.probe.predictions import lines_in, sentences
from precision_lab.probe.tally import FORMATS, Key, Range, Tallies, scale_window, share, short, total
from precision_lab.probe.trace import leaves_no_trace
from precision_lab.recorder import Recorder, append, write_whole, writing
from precision_lab.seeds import generator_states, restore_generators, seed_globals
from precision_lab.task import Task

SCHEMA_VERSION = 1
_GRADIENTS = ("activation_gradient", "weight_gradient")
_LARGEST_FLOAT16 = FORMATS["float16"].largest


class Training(Protocol):
    """What is watched of a trainer."""

    plan: TrainerConfig
    policy: Policy
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    done: int


class Watch:
    """Looks after every `every`-th step; with None never. Where it cannot look, it says so once and ends, not the run.

    `place` moves a batch to the device.
    """

    def __init__(self, every: int | None, training: Training, place: Callable[[Any], Any], recorder: Recorder):
        self._every, self._training, self._place, self._recorder = every, training, place, recorder
        self._file = recorder.folder / "probe" / "ranges.jsonl"
        self._batch: Any = None  # on the CPU: in the device's memory it would be measured with the step
        self._before: dict[str, Tensor] | None = None  # weights before a step to be looked at, for the same reason too
        self._kept_at = -1
        self._looked_at = 0
        self._unlogged: dict[str, float] = {}

    def begin(self, batches: Iterator[Any], anew: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Get ready to train on `batches`, of which `anew` gives those from the first on; return them, all.

        The first is taken from the batches themselves where it is still to come: a dataset of the user's may notice
        that it is read once more.
        """
        if self._every is None:
            return batches
        done = self._training.done
        self._go_on_after(done)
        first = next(anew() if done else batches)
        self._batch = map_tensors(lambda tensor: tensor.to("cpu", copy=True), first)
        self.look(done)
        return batches if done else chain([first], batches)

    def _go_on_after(self, done: int) -> None:
        """Drop the lines of later steps, and find out what no log point has yet."""
        lines = [line for line in lines_in(self._file) if line["step"] <= done]
        if self._file.exists():
            write_whole(self._file, "".join(map(_as_text, lines)))
        if lines:
            self._looked_at = lines[-1]["step"]
            if self._looked_at > max((line["train/step"] for line in self._recorder.logged()), default=0):
                self._unlogged = lines[-1]["metrics"]

    def wanted(self, done: int) -> bool:
        """Whether `look` has something to do after `done` steps."""
        return self._every is not None and (done % self._every == 0 or (done + 1) % self._every == 0)

    def look(self, done: int) -> None:
        """To be called after each step that is `wanted`, outside the clock; a second time it does nothing."""
        if not self.wanted(done):
            return
        if done % self._every == 0 and done > self._looked_at:
            self._look(done)
        if self._every and (done + 1) % self._every == 0 and self._kept_at != done:
            named = self._training.model.named_parameters()
            self._before = {name: p.detach().to("cpu", copy=True) for name, p in named}
            self._kept_at = done

    def readings(self, done: int) -> dict[str, float]:
        """By metric name, of the last step looked at, at the log point after `done` steps: each once."""
        self.look(done)
        found, self._unlogged = self._unlogged, {}
        return found

    def predictions(self) -> list[str]:
        """What is to be feared in float16 and bfloat16, after all that the run has seen, in sentences."""
        precision = self._training.policy.config
        return sentences(lines_in(self._file), precision.min_scale) if self._file.exists() else []

    def _look(self, done: int) -> None:
        self._looked_at = done
        try:
            line = self._line(done)
        except Exception as error:
            what = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            what = "ran out of memory" if hardware.is_out_of_memory(error) else what
            log.warning("probe.ranges: the float32 pass after step %d %s; it is not tried again.", done, what)
            line = None
        self._before = None
        if line is None:  # out here nothing holds the failed pass's tensors
            self._every = self._batch = None
            hardware.release_memory()
            return
        self._unlogged = line["metrics"]
        with writing(self._file.parent):
            self._file.parent.mkdir(exist_ok=True)
        append(self._file, _as_text(line).encode())

    def _line(self, done: int) -> dict[str, Any]:
        training, tallies = self._training, Tallies()
        _count_state(tallies, training.model, training.optimizer)
        updates = _updates(training.model, self._before)
        float16 = training.policy.compute_dtype is torch.float16
        scale = training.scaler.get_scale() if float16 else training.policy.config.init_scale
        loss = self._pass(tallies, scale)
        found = tallies.read()
        window = scale_window({key: one for key, one in found.items() if key[1] in _GRADIENTS})
        whole = None if updates is None else _added_up(updates.values())
        return {
            "schema": SCHEMA_VERSION,
            "step": done,
            "loss": loss if abs(loss) < float("inf") else None,
            "loss_scale": scale,
            "metrics": _metrics(found, whole),
            "scale_window": window.stored() if window else None,
            "lost_updates": whole and _stored(whole),
            "modules": _by_module(training.model, found, updates or {}),
        }

    def _pass(self, tallies: Tallies, scale: float) -> float:
        """Forward and backward in float32 on the run's first batch; its loss."""
        training = self._training
        model, policy = training.model, training.policy
        batch = self._place(map_tensors(Tensor.clone, self._batch))  # a model may write into it
        generators = generator_states(policy.device.type)
        try:
            with leaves_no_trace(model), policy.reference(model), torch.enable_grad():
                seed_globals(0)  # the same dropout each time
                with _counting(tallies, model, scale):
                    loss, _ = training.task(model, batch)
                    (loss / training.plan.accumulation).backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        _count_gradient(tallies, _owner(name), "weight_gradient", scale, parameter.grad)
                return float(loss.detach())
        finally:
            restore_generators(generators, policy.device.type)


def _as_text(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


# --- counting ----------------------------------------------------------------------------------------------------


@contextmanager
def _counting(tallies: Tallies, model: nn.Module, scale: float) -> Iterator[None]:
    """Within, all that modules return is counted, and the gradients of it."""
    seen = WeakTensorKeyDictionary()  # tensor -> its version: a container may return what a child of it returned

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and _is_countable(leaf) and seen.get(leaf) != leaf._version:
                seen[leaf] = leaf._version
                tallies.add(name, "activation", leaf)
                if leaf.requires_grad:
                    leaf.register_hook(partial(_count_gradient, tallies, name, "activation_gradient", scale))

    handles = [module.register_forward_hook(partial(after, name or "")) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count_gradient(tallies: Tallies, module: str, quantity: str, scale: float, gradient: Tensor) -> None:
    if _is_countable(gradient):
        tallies.add(module, quantity, gradient, by_power=True)
        tallies.add(module, f"{quantity}_scaled", gradient.detach() * scale)


def _count_state(tallies: Tallies, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Buffers, and what the optimizer keeps of each parameter but for its counters."""
    for name, buffer in model.named_buffers():
        if _is_countable(buffer):
            tallies.add(_owner(name), f"buffer.{name.rpartition('.')[2]}", buffer)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and _is_countable(value):
                tallies.add(_owner(name), f"optimizer_state.{key}", value)


def _is_countable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout in (torch.strided, torch.sparse_coo) and tensor.numel() > 0


def _owner(name: str) -> str:
    """The module of a parameter or buffer."""
    return name.rpartition(".")[0]


_UPDATES = ("asked", "lost", "moved", *(f"lost_{name}" for name in FORMATS))


def _updates(model: nn.Module, before: dict[str, Tensor] | None) -> dict[str, dict[str, int]] | None:
    """_UPDATES as counts by module, between the weights `before` the last step and those now.

    None where that step was skipped, or the weights before it are not known.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None and p.is_floating_point()]
    if before is None or not all(bool(_dense(p.grad).isfinite().all()) for _, p in named):
        return None
    counted: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for name, parameter in named:
            counts = _updates_of(parameter, before[name].to(parameter.device))
            counted.setdefault(_owner(name), []).append(counts)
    return {
        module: dict(zip(_UPDATES, torch.stack(counts).sum(0).tolist(), strict=True))
        for module, counts in counted.items()
    }


def _updates_of(parameter: nn.Parameter, before: Tensor) -> Tensor:
    """_UPDATES as counts, of one parameter."""
    asked = _dense(parameter.grad) != 0
    counts = [asked.sum(), (asked & (parameter == before)).sum()]
    if parameter.dtype is not torch.float32:  # the update itself was rounded
        return torch.stack([*counts, *[torch.zeros_like(counts[0])] * (1 + len(FORMATS))])
    update = parameter - before
    moved = update != 0
    counts.append(moved.sum())
    for name in FORMATS:
        dtype = getattr(torch, name)
        held = before.to(dtype)
        counts.append((moved & ((held.float() + update).to(dtype) == held)).sum())
    return torch.stack(counts)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


# --- what is stored ----------------------------------------------------------------------------------------------


def _added_up(updates: Any) -> dict[str, int]:
    updates = list(updates)
    return {name: sum(one[name] for one in updates) for name in _UPDATES}


def _stored(updates: dict[str, int]) -> dict[str, float]:
    """Counts of _UPDATES as shares; those of the formats where weights are float32."""
    found = {"asked": updates["asked"], "lost": short(share(updates["lost"], updates["asked"]))}
    if updates["moved"]:
        of_formats = {name: short(share(updates[name], updates["moved"])) for name in _UPDATES[3:]}
        found |= {"moved": updates["moved"], **of_formats}
    return found


def _by_module(
    model: nn.Module, found: dict[Key, Range], updates: dict[str, dict[str, int]]
) -> dict[str, dict[str, Any]]:
    modules: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        quantities = {quantity: one.stored() for (owner, quantity), one in found.items() if owner == name}
        if name in updates:
            quantities["updates"] = _stored(updates[name])
        if quantities:
            modules[name] = {"type": type(module).__name__, **quantities}
    return modules


def _metrics(found: dict[Key, Range], updates: dict[str, int] | None) -> dict[str, float]:
    """By metric name; what is not known is left out."""
    activations = total(one for (_, quantity), one in found.items() if quantity == "activation")
    scaled = total(one for (_, quantity), one in found.items() if quantity.endswith("_scaled"))
    plain = total(one for (_, quantity), one in found.items() if quantity in _GRADIENTS)
    metrics = {
        "range/activation_headroom_fp16": short(activations.headroom("float16")),
        "range/gradient_headroom_fp16": short(scaled.headroom("float16")),
        "range/gradient_flushed_fp16": short(share(scaled.flushed["float16"], scaled.nonzero)),
        "range/nonfinite_values": activations.nonfinite + plain.nonfinite,
    }
    if updates and updates["asked"]:
        stored = _stored(updates)
        metrics["range/lost_updates"] = stored["lost"]
        if "lost_bfloat16" in stored:
            metrics["range/lost_updates_bf16"] = stored["lost_bfloat16"]
    return metrics
