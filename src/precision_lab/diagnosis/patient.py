"""One training step, forward and backward, taken again and again from the same state in different arithmetic.

Knows: the model, the batch, the target's policy and rounding, what is kept in float32, and the gradients that come out.
Refuses to know what is looked for. Each pass begins with equal weights, buffers and random state and leaves them so.
The error of a gradient g' is a signal to quantisation noise ratio (SQNR), 10 log10(|g|^2 / |g - g'|^2) in dB over all
parameters, g from IEEE float32.
"""

import copy
import glob
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precision_lab.config import PrecisionConfig
from precision_lab.diagnosis.local import LocalErrors
from precision_lab.emulation.kernels import AutocastKernels, emulated, in_float32, installed
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.errors import InputError, require
from precision_lab.hardware import is_out_of_memory
from precision_lab.nested import map_tensors
from precision_lab.precision import SIGNIFICAND_BITS, cast_inputs_to_parameters, keep_in_float32
from precision_lab.probe.scopes import ModuleScopes
from precision_lab.probe.trace import leaves_no_trace
from precision_lab.task import Task

_FLOORS = 5


@dataclass(frozen=True)
class Kept:
    """What is kept in float32: modules, named as in `named_modules()`, and operations."""

    modules: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a pass gave. `sqnr` in dB, minus infinity where a gradient is not finite."""

    sqnr: float = -math.inf
    scale: float = 1.0
    nonfinite: list[str] = field(default_factory=list)  # modules whose outputs are not, as float32's are; in order
    without_gradient: list[str] = field(default_factory=list)  # parameters that have one in float32
    raised: Exception | None = None

    @property
    def finite(self) -> bool:
        return self.raised is None and not self.nonfinite and self.sqnr > -math.inf


class NoGradient(Exception):
    """No parameter receives a gradient, in float32 either."""


class Patient:
    """A training step that can be taken in any arithmetic; `passes` counts how often it was.

    `target` is the device whose mixed precision is meant. On a CPU it is emulated, on the target itself it is its own.
    `floor` is the SQNR of float32 arithmetic on weights and inputs rounded to the significand of the arm's dtype, and
    `noise` that of a second float32 pass: infinite if the model is deterministic.
    InputError where nothing can be trained, and where weights or the float32 step are not finite; what the step itself
    raises in float32 is raised.
    """

    def __init__(self, model: nn.Module, task: Task, batch: Any, precision: PrecisionConfig, target: str):
        self.model, self.task, self.batch, self.target = model, task, batch, target
        self._take_up(precision)
        trained = [p for p in model.parameters() if p.requires_grad]
        require(trained, "The model has no parameter that requires a gradient: there is nothing to train.")
        self.device = trained[0].device
        self.emulates = self.device.type == "cpu"
        self._passes = [0]  # shared with those of `under`
        self._require_finite_weights()
        finite = _FiniteOutputs(model)
        with leaves_no_trace(model), finite.counted():
            self.loss = self._step(batch)
            self._refer_to(_gradients(model))
        if not any(g is not None and bool(g.any()) for g in self.reference):
            raise NoGradient
        self.reference_counts = finite.counts()
        self.ran = [name for name in self.reference_counts if name]
        if not math.isfinite(self.loss) or not all(g is None or g.isfinite().all() for g in self.reference):
            raise InputError(
                f"The step is not finite in float32 (loss {self.loss:g}); no precision heals that. Diagnose the model "
                "before it diverged."
            )
        with leaves_no_trace(model):
            self._step(batch)
            self.noise = self._sqnr(_gradients(model), 1.0)
        self.floor = self._floor(None)
        self._floors = 1

    @property
    def passes(self) -> int:
        """Forward and backward passes taken so far."""
        return self._passes[0]

    def under(self, precision: PrecisionConfig) -> "Patient":
        """The same step in an arm with other settings, measured against the same float32 gradients."""
        other = copy.copy(self)
        other._take_up(precision)
        return other

    def _take_up(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self.dtype = getattr(torch, (precision.autocast_dtype or precision.param_dtype).name)
        self.bits = SIGNIFICAND_BITS[str(self.dtype).removeprefix("torch.")]
        self.pure = precision.autocast_dtype is None  # parameters in low precision, no autocast
        self.scale = precision.init_scale if precision.grad_scaling else 1.0  # of the loss; what the last arm came to

    def arm(self, kept: Kept = Kept()) -> Outcome:
        """The arm's own step with `kept` in float32, under the loss scale that a scaler comes to from its first."""
        scale = self.scale
        outcome = self._arm(kept, scale)
        while self.overflows_backward(outcome) and scale > self.precision.min_scale:
            scale = max(self.precision.min_scale, scale / 4)
            outcome = self._arm(kept, scale)
        if outcome.finite:
            self.scale = scale
        return outcome

    def overflows_backward(self, outcome: Outcome) -> bool:
        """Whether a smaller loss scale may help."""
        return self.precision.grad_scaling and not (outcome.finite or outcome.nonfinite or outcome.raised)

    def gradients(self) -> list[Tensor | None]:
        """Of the arm's own step, unscaled, in the dtype it keeps them in."""
        scale = self.scale
        with self._arithmetic(Kept(), lambda kernels: self._units()):
            gradients = _gradients(self._take(scale))
        return [None if g is None else g / scale for g in gradients]

    def watched(self, watch: TorchDispatchMode) -> Exception | None:
        """Take the arm's own step with `watch` above its arithmetic; return what it raised."""
        with self._arithmetic(Kept(), lambda kernels: self._units()), watch:
            try:
                self._take(self.scale)
            except Exception as error:
                return self._of_the_arm(error)
        return None

    def local_errors(self, kept: Kept = Kept()) -> LocalErrors:
        """Each operation's own error in the arm's step with `kept` in float32, as far as the step comes."""
        scopes = ModuleScopes(self.model)

        def errors(kernels: AutocastKernels) -> LocalErrors:
            return LocalErrors(scopes, kernels, self.emulates)

        with scopes.tracked(), self._arithmetic(kept, errors) as found, found.functions:
            try:
                self._take(self.scale)
            except Exception as error:
                self._of_the_arm(error)
                found.raised()
        found.let_go()
        return found

    @contextmanager
    def _arithmetic(self, kept: Kept, mode: Callable[[AutocastKernels], Any]) -> Iterator[Any]:
        """Within: the target's kernels, the mode that is made on them, and `kept` in float32. Leaves nothing behind."""
        with ExitStack() as stack:
            stack.enter_context(leaves_no_trace(self.model))
            modules = [*self.precision.fp32_modules, *map(glob.escape, kept.modules)]
            ops = [*self.precision.fp32_ops, *kept.ops]
            stack.enter_context(_keeping(self.model, modules, self.device.type))
            casts = emulated(self.target, ops) if self.emulates else in_float32(ops)
            kernels = AutocastKernels(self.device.type, casts, self.target if self.emulates else None)
            stack.enter_context(installed(kernels))
            yield stack.enter_context(mode(kernels))

    def _of_the_arm(self, error: Exception) -> Exception:
        """An exception that tells something of the arm; wrong input and a lack of memory do not, and are raised."""
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise error
        return error

    def _units(self) -> AbstractContextManager:
        return WideArithmetic() if self.emulates else nullcontext()

    def _take(self, scale: float) -> nn.Module:
        """Forward and backward in the arm's dtypes; returns the model that has the gradients. Within `_arithmetic`."""
        self._passes[0] += 1
        model = self.model
        if self.pure:
            model = copy.deepcopy(model).to(self.dtype)
            model.register_forward_pre_hook(cast_inputs_to_parameters, with_kwargs=True)
        with torch.autocast(self.device.type, dtype=None if self.pure else self.dtype, enabled=not self.pure):
            loss = self._loss(model, self.batch)
        (loss.float() * scale).backward()
        return model

    def _arm(self, kept: Kept, scale: float) -> Outcome:
        outcome = Outcome(scale=scale)
        finite = _FiniteOutputs(self.model)
        with self._arithmetic(kept, lambda kernels: self._units()), finite.counted():
            try:
                model = self._take(scale)
            except Exception as error:
                outcome.raised = self._of_the_arm(error)
                return outcome
            gradients = _gradients(model)
        counts = finite.counts()
        outcome.nonfinite = [name for name, n in counts.items() if n > self.reference_counts.get(name, 0)]
        names = [name for name, _ in self.model.named_parameters()]
        for name, own, reference in zip(names, gradients, self.reference, strict=True):
            if own is None and reference is not None:
                outcome.without_gradient.append(name)
        outcome.sqnr = self._sqnr(gradients, scale)
        return outcome

    def refine_floor(self) -> None:
        """Take the worst of several floors. Where a rounding turns a ReLU over, two of them may lie far apart."""
        for draw in range(self._floors, _FLOORS):
            self.floor = min(self.floor, self._floor(torch.Generator(self.device).manual_seed(draw)))
        self._floors = _FLOORS

    def excess_nearby(self, draw: int) -> float:
        """How much worse the arm is, in dB, on other weights and inputs, which are off by roundings of random signs."""
        with self._off(torch.Generator(self.device).manual_seed(_FLOORS + draw)) as batch:
            nearby = copy.copy(self)
            nearby.batch = batch
            with leaves_no_trace(self.model):
                self._step(batch)
                nearby._refer_to(_gradients(self.model))
            return self.excess(nearby.arm())

    def _floor(self, signs: torch.Generator | None) -> float:
        with self._off(signs) as batch, leaves_no_trace(self.model):
            self._step(batch)
            return self._sqnr(_gradients(self.model), 1.0)

    @contextmanager
    def _off(self, signs: torch.Generator | None) -> Iterator[Any]:
        """Within: weights are off by the error of rounding them, or with `signs`, by that with random signs. The batch
        that it gives is, too.

        Range is left unlimited: that a value does not fit is the arm's fault, not the number format's.
        """

        def off(value: Tensor) -> Tensor:
            rounded = round_significand(value, self.bits)
            if signs is None:
                return rounded
            sign = torch.rand(value.shape, generator=signs, device=value.device) < 0.5
            return torch.where(sign, rounded, 2 * value - rounded)

        batch = map_tensors(lambda t: off(t) if t.is_floating_point() else t, self.batch)
        before = [p.detach().clone() for p in self.model.parameters()]
        try:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.copy_(off(p))
            yield batch
        finally:
            with torch.no_grad():
                for p, kept in zip(self.model.parameters(), before, strict=True):
                    p.copy_(kept)

    def _step(self, batch: Any) -> float:
        """Forward and backward in float32."""
        self._passes[0] += 1
        with torch.autocast(self.device.type, enabled=False):
            loss = self._loss(self.model, batch)
        if not loss.requires_grad:
            raise NoGradient
        loss.backward()
        return float(loss.detach())

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        told = self.task(model, batch)
        loss = told[0] if isinstance(told, tuple) and len(told) == 2 else None
        require(isinstance(loss, Tensor), "task: it must return a pair, the loss as a tensor and its metrics.")
        if loss.numel() != 1:
            raise InputError(f"task: the loss has shape {tuple(loss.shape)}; it must be a single number.")
        return loss

    def _refer_to(self, gradients: list[Tensor | None]) -> None:
        self.reference = gradients
        self._norm = sum(float(g.double().square().sum()) for g in gradients if g is not None)

    def _sqnr(self, gradients: list[Tensor | None], scale: float) -> float:
        error = 0.0
        for own, reference in zip(gradients, self.reference, strict=True):
            if reference is not None:
                own = torch.zeros_like(reference) if own is None else own
                error += float((reference.double() - own.double() / scale).square().sum())
        if not math.isfinite(error):
            return -math.inf
        return math.inf if error == 0 else 10 * math.log10(self._norm / error) if self._norm else 0.0

    @property
    def bound(self) -> float:
        """The SQNR in dB that a healthy arm comes near to: no more than the number format on this model, chance, and a
        single rounding leave."""
        return min(self.floor, self.noise, self.one_rounding)

    @property
    def one_rounding(self) -> float:
        """The SQNR in dB of rounding values near 1: an error that is uniform within half a unit in the last place."""
        return 20 * math.log10(2 ** (self.bits + 1) * math.sqrt(3))

    def excess(self, outcome: Outcome) -> float:
        """How much worse the arm's gradient is than the number format alone makes it, in dB."""
        return self.bound - outcome.sqnr

    def _require_finite_weights(self) -> None:
        for name, p in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if p.is_floating_point() and bool(p.isnan().any()):
                raise InputError(f"{name} holds NaN: these weights have diverged. Diagnose those of before.")


def round_significand(value: Tensor, bits: int) -> Tensor:
    """Round to nearest, ties to even, to 1 + `bits` significant bits, whatever the exponent."""
    if value.is_complex():
        return torch.view_as_complex(round_significand(torch.view_as_real(value.detach()), bits))
    mantissa, exponent = torch.frexp(value.detach())
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(bits + 1))), exponent - (bits + 1)).to(
        value.dtype
    )


def _gradients(model: nn.Module) -> list[Tensor | None]:
    """Dense and real: that of an embedding may be sparse, a complex one counts by its parts."""
    dense = [
        p.grad if p.grad is None or p.grad.layout is torch.strided else p.grad.to_dense() for p in model.parameters()
    ]
    return [g if g is None or not g.is_complex() else torch.view_as_real(g) for g in dense]


@contextmanager
def _keeping(model: nn.Module, patterns: list[str], device_type: str) -> Iterator[None]:
    """Within: these modules in float32, by the same means as precision.fp32_modules."""
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        keep_in_float32(model, patterns, device_type, set())
        yield
    finally:
        for module, forward in before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


class _FiniteOutputs:
    """How many values of each module's outputs are not finite, by name, in the order in which modules first end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, list[Tensor]] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        scripted = torch.jit.ScriptModule  # takes no hooks
        named = [(name, m) for name, m in self._model.named_modules() if not isinstance(m, scripted)]
        hooks = [m.register_forward_hook(self._hook(name)) for name, m in named]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def counts(self) -> dict[str, int]:
        return {name: int(torch.stack(found).sum()) for name, found in self._found.items() if found}

    def _hook(self, name: str):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = self._found.setdefault(name, [])
            for t in tree_leaves(output):
                if isinstance(t, Tensor) and t.is_floating_point():
                    found.append((~t.detach().isfinite()).sum())

        return hook
