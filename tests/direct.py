"""One training step under an arm, measured straight from the definitions, with no search and no diagnosis.

SQNR in dB over all gradients as one float64 vector. Excess: the SQNR of float32 arithmetic on rounded weights and
inputs, minus that of the arm.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precision_lab.emulation.kernels import AutocastKernels, emulated, installed
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.nested import map_tensors
from precision_lab.precision import cast_floating, keep_in_float32

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp16_unscaled": torch.float16,
    "bf16_pure": torch.bfloat16,
}
SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11}


@dataclass
class Step:
    """One forward and backward: the loss, what each parameter got (None: nothing), and every module's output."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    outputs: dict[str, list[Tensor]] = field(repr=False)
    model: nn.Module = field(repr=False)

    def vector(self) -> Tensor:
        parts = [
            p.new_zeros(p.shape) if self.gradients[n] is None else self.gradients[n]
            for n, p in self.model.named_parameters()
        ]
        return torch.cat([part.double().flatten() for part in parts])

    def finite(self) -> bool:
        return bool(self.loss.isfinite()) and bool(self.vector().isfinite().all())


def sqnr(reference: Step, other: Step) -> float:
    """10 log10(|reference|^2 / |reference - other|^2)."""
    a, b = reference.vector(), other.vector()
    return float(10 * torch.log10(a.square().sum() / (a - b).square().sum()))


def plain(case: Any, model: nn.Module, batch: Any) -> Step:
    """In float32."""
    return _step(case, copy.deepcopy(model).float(), batch, 1.0)


def floors(case: Any, model: nn.Module, batch: Any) -> Iterator[Step]:
    """In float32, on weights and inputs that are off by the error of rounding them to the arm's significand.

    First by that error itself, then by it with random signs: where a rounding turns a ReLU over, two of them may lie
    far apart, and the worst counts.
    """
    bits = SIGNIFICAND[DTYPES[case.precision]]
    for draw in range(5):
        signs = torch.Generator().manual_seed(draw) if draw else None
        off = copy.deepcopy(model).float()
        with torch.no_grad():
            for parameter in off.parameters():
                parameter.copy_(_off(parameter, bits, signs))
        yield _step(case, off, map_tensors(partial(_off, bits=bits, signs=signs), batch), 1.0)


def arm(
    case: Any, model: nn.Module, batch: Any, modules: list[str] | None = None, ops: list[str] | None = None
) -> Step:
    """In the case's precision, as its target does it, with these modules and operations in float32."""
    dtype, pure = DTYPES[case.precision], case.precision == "bf16_pure"
    scale = 65536.0 if case.precision == "fp16" else 1.0
    with installed(AutocastKernels("cpu", emulated(case.target, ops or []), case.target)):
        while True:
            own = copy.deepcopy(model)
            if pure:
                own, batch = own.to(dtype), cast_floating(batch, dtype)
            keep_in_float32(own, modules or [], "cpu", set())
            done = _step(case, own, batch, scale, None if pure else dtype)
            if scale == 1 or not done.loss.isfinite() or done.finite():
                return done
            scale /= 2


def excess(case: Any, model: nn.Module, batch: Any, **kept: list[str]) -> float:
    """In dB; inf where the arm's gradients are not finite."""
    reference = plain(case, model, batch)
    done = arm(case, model, batch, **kept)
    if not done.finite():
        return torch.inf
    return min(sqnr(reference, step) for step in floors(case, model, batch)) - sqnr(reference, done)


def new_nonfinite(reference: Step, other: Step) -> list[str]:
    """Modules whose output has a value that is not finite where float32 has a finite one."""
    return [
        name
        for name, outputs in other.outputs.items()
        for mine, theirs in zip(outputs, reference.outputs[name], strict=True)
        if (~mine.isfinite() & theirs.isfinite()).any()
    ]


def _step(case: Any, model: nn.Module, batch: Any, scale: float, dtype: torch.dtype | None = None) -> Step:
    outputs: dict[str, list[Tensor]] = {}
    model.train()
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _m, _i, out, name=name: (
                outputs.setdefault(name, []).append(out.detach()) if isinstance(out, Tensor) else None
            )
        )
    with ExitStack() as stack:
        stack.enter_context(WideArithmetic() if dtype or case.precision == "bf16_pure" else nullcontext())
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss, _ = case.task(model, batch)
        (loss * scale).backward()
    gradients = {n: None if p.grad is None else p.grad / scale for n, p in model.named_parameters()}
    return Step(loss.detach(), gradients, outputs, model)


def _off(value: Tensor, bits: int, signs: torch.Generator | None) -> Tensor:
    if not value.is_floating_point():
        return value
    mantissa, exponent = torch.frexp(value.detach())
    rounded = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    if signs is None:
        return rounded
    return torch.where(torch.rand(value.shape, generator=signs) < 0.5, rounded, 2 * value - rounded)
