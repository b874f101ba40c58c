"""Causes that can be named by looking: at parameters, at the graph, and at what one step of the arm does.

Knows what is known to go wrong, and how to tell it. Refuses to measure what it costs: but for parameters in a wrong
dtype and a loss that reaches no parameter, a cause is a remark, which may explain a finding and is none by itself.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from precision_lab.arm_schema import PrecisionConfig
from precision_lab.diagnosis.causes import Cause
from precision_lab.diagnosis.patient import Patient
from precision_lab.diagnosis.suspicions import Suspicions, probabilities
from precision_lab.emulation.rounding import LOW
from precision_lab.probe.scopes import ModuleScopes
from precision_lab.probe.trace import leaves_no_trace
from precision_lab.task import Task

_TENSORS_ALONE = "Use tensor operations alone: no .item(), .detach(), .data, numpy or torch.tensor(...) on the way."


def wrong_dtypes(model: nn.Module, precision: PrecisionConfig) -> list[Cause]:
    """Of a model that was just built: modules that hold parameters in another dtype than float32.

    A module stands for all in it where all of it is wrong. An arm with low-precision parameters casts them itself.
    """

    def wrong(p: Tensor) -> bool:
        return p.is_floating_point() and p.dtype is not torch.float32

    found = []
    for name in _whole_modules(model, wrong):
        dtype = next(p.dtype for p in model.get_submodule(name).parameters() if wrong(p))
        if precision.grad_scaling and dtype is torch.float16:
            hurts = "a gradient scaler refuses to unscale float16 gradients"
        elif precision.grad_scaling and dtype is torch.bfloat16:
            hurts = "a gradient scaler cannot unscale bfloat16 gradients on CUDA, while on a CPU it does"
        elif dtype in LOW:
            hurts = "small updates do not change them"
        else:
            hurts = "autocast does not touch them, and float32 inputs do not fit them"
        says = f"Its parameters are {_short(dtype)}: {hurts}."
        remedy = "Build or load it in float32; the precision decides what is computed with them, and in what."
        found.append(Cause("parameter_dtype", name, says, remedy, certain=True))
    return found


def no_gradient(model: nn.Module, task: Task, batch: Any) -> list[Cause]:
    """Of a step in which no parameter receives a gradient: where the graph ends."""
    watched = _WatchedModules(model)
    with leaves_no_trace(model), watched.tracked():
        loss = task(model, batch)[0]
    if watched.last_end is not None:
        where, says = watched.last_end, "Its inputs carry a gradient and its output does not."
    elif not watched.carried:
        where, says = "", "No output of any module depends on a parameter that requires a gradient."
    elif loss.grad_fn is None:
        where, says = "task", "The loss is a new tensor, from which no path leads back to the model."
    else:
        where, says = "task", "The loss does not change with the outputs of the model."
    return [Cause("no_gradient", where, f"{says} No parameter receives one.", _TENSORS_ALONE, certain=True)]


def look(patient: Patient) -> list[Cause]:
    """Take the arm's step once and name what is known to go wrong: one of a kind for each module."""
    scopes, watched = ModuleScopes(patient.model), _WatchedModules(patient.model)
    suspicions = Suspicions(scopes, patient.dtype)
    of_loss: list[Cause] = []

    def task(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with watched.tracked():
            loss, metrics = patient.task(model, batch)
        of_loss.extend([*_low_loss(loss), *_bare_functions(loss, scopes)])
        return loss, metrics

    tapped = copy.copy(patient)
    tapped.task = task
    with scopes.tracked():
        raised = tapped.watched(suspicions)
    found = [*suspicions.causes(), *of_loss, *watched.poisoned()]
    if raised is not None and "binary_cross_entropy" in str(raised):
        found.append(probabilities(scopes.raised_in or ""))
    if watched.last_end is not None:
        found.append(_graph_ends(watched.last_end))
    found += _unused(patient)
    return list({(cause.code, cause.where): cause for cause in reversed(found)}.values())[::-1]


def optimizer_state(model: nn.Module, build: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Cause]:
    """What an optimizer keeps below float32 for parameters of the dtypes that `model` has. Steps a copy of it."""
    own = copy.deepcopy(model)
    for p in own.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer = build(own)
    optimizer.step()
    kept = [state for state in optimizer.state.values() for state in state.items()]
    low = {name: value.dtype for name, value in kept if isinstance(value, Tensor) and value.dtype in LOW}
    if not low:
        return []
    says = f"It keeps {' and '.join(low)} in {_short(next(iter(low.values())))}, where a slow average stands still."
    remedy = "Hold the parameters in float32 and let autocast lower what is computed with them, as precision=bf16 does."
    return [Cause("optimizer_state", type(optimizer).__name__, says, remedy)]


class _WatchedModules:
    """What the outputs of modules tell, in one forward: where a gradient ends, and which buffers it has spoilt."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._spoilt_before = {name for name, buffer in model.named_buffers() if _spoilt(buffer)}
        self._poisoned: dict[str, list[str]] = {}
        self.carried = False  # whether any output carries a gradient
        self.last_end: str | None = None  # the last module that takes one that does and returns none

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Within: modules are watched."""
        hook = register_module_forward_hook(self._returned)
        try:
            yield
        finally:
            hook.remove()

    def poisoned(self) -> list[Cause]:
        """The first module of which the forward has made buffers infinite or NaN: those behind it follow from it."""
        if not self._poisoned:
            return []
        name, buffers = next(iter(self._poisoned.items()))
        says = f"Its {' and '.join(buffers)} took values that are not finite, which evaluation would use"
        says += f"; {len(self._poisoned) - 1} modules behind it have such, too." if len(self._poisoned) > 1 else "."
        remedy = "Keep what feeds it in float32; train.py puts buffers back after a step that is not finite."
        return [Cause("buffers_not_finite", name, says, remedy)]

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return
        inputs, outputs = _floating(args), _floating(output)
        if torch.is_grad_enabled() and outputs:
            carries = any(t.grad_fn is not None for t in outputs)
            self.carried |= carries
            inside = self.last_end is not None and self.last_end.startswith(f"{name}.")
            if not carries and any(t.grad_fn is not None for t in inputs) and not inside:
                self.last_end = name
        spoilt = [
            buffer
            for buffer, value in module.named_buffers(recurse=False)
            if _spoilt(value) and f"{name}.{buffer}".lstrip(".") not in self._spoilt_before
        ]
        if spoilt:
            self._poisoned[name] = spoilt


def _floating(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


def _spoilt(value: Tensor) -> bool:
    return value.is_floating_point() and not bool(value.isfinite().all())


def _graph_ends(where: str) -> Cause:
    says = "Its inputs carry a gradient and its output does not: what comes before it learns nothing through it."
    return Cause("graph_ends", where, says, f"If that is not meant: {_TENSORS_ALONE[0].lower()}{_TENSORS_ALONE[1:]}")


def _low_loss(loss: Tensor) -> list[Cause]:
    if loss.dtype not in LOW:
        return []
    says = (
        f"The task hands the loss over in {_short(loss.dtype)}: near {float(loss.detach()):.3g} it moves in steps of "
    )
    says += f"{torch.finfo(loss.dtype).eps * 2 ** torch.frexp(loss.detach().float()).exponent.item() / 2:.2g}."
    return [Cause("low_loss", "task", says, "Compute the loss from logits.float().")]


def _bare_functions(loss: Tensor, scopes: ModuleScopes) -> list[Cause]:
    """Autograd Functions in the graph that torch.amp's decorators were not put on."""
    found, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is None or function.__module__.startswith("torch.") or hasattr(node, "_fwd_used_autocast"):
            continue
        says = f"{function.__qualname__} has no custom_fwd and custom_bwd: its backward runs outside autocast, on "
        says += "whatever dtypes its forward has saved."
        remedy = "Decorate its forward with torch.amp.custom_fwd and its backward with torch.amp.custom_bwd."
        found.append(Cause("function_without_autocast", scopes.made_in(node), says, remedy))
    return found


def _unused(patient: Patient) -> list[Cause]:
    """Parameters that require a gradient and get none in float32: weight decay alone moves them."""
    named = dict(zip((name for name, _ in patient.model.named_parameters()), patient.reference, strict=True))
    idle = {name for name, gradient in named.items() if gradient is None}
    asked = {id(p) for name, p in patient.model.named_parameters() if name in idle and p.requires_grad}
    says = "Its parameters require a gradient and receive none, in float32 either."
    remedy = "Freeze them with requires_grad_(False), or use them."
    where = _whole_modules(patient.model, lambda p: id(p) in asked)
    return [Cause("unused_parameters", name, says, remedy) for name in where]


def _whole_modules(model: nn.Module, wrong: Callable[[Tensor], bool]) -> list[str]:
    """Names of modules with wrong parameters of their own, or of the largest around them in which all are wrong."""

    def whole(name: str) -> bool:
        return all(wrong(p) for p in model.get_submodule(name).parameters() if p.is_floating_point())

    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if any(wrong(p) for p in module.parameters(recurse=False)):
            parts = name.split(".")
            around = ["", *(".".join(parts[:n]) for n in range(1, len(parts) + 1))]
            found[next((one for one in around if whole(one)), name)] = None
    return list(found)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
