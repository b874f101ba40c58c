"""Optimizers, learning-rate schedules, and the guard that keeps a non-finite step out of the weights.

A schedule is a pure function `(step, total_steps, ...) -> factor` of the attempted step index, so
that every arm has the same learning rate at the same step whatever it skipped.
"""

import math
from collections.abc import Callable
from itertools import compress

import torch
from torch import Tensor, nn

from precision_lab import targets
from precision_lab.errors import InputError

Schedule = Callable[[int, int], float]


def constant(step: int, total_steps: int, warmup_steps: int) -> float:
    """1 after a linear warm-up from 0."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def cosine(step: int, total_steps: int, warmup_steps: int, final_factor: float) -> float:
    """Linear warm-up, then half a cosine from 1 to `final_factor` at the last step.

    The warm-up is cut to a tenth of a short run, so that a few steps still reach the peak.
    """
    warmup = min(warmup_steps, total_steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(node: dict, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters that require gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(f"model={type(model).__name__} has no parameter that requires a gradient.")
    optimizer = targets.instantiate("optimizer", node, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer._target_={node['_target_']} built {type(optimizer).__name__}, not a torch optimizer."
        )
    low = next((p.dtype for p in parameters if p.device.type == "cpu" and p.dtype.itemsize < 4), None)
    if low and isinstance(optimizer, torch.optim.SGD) and node.get("fused") and not _fused_sgd_is_right(low):
        raise InputError(
            f"Fused SGD computes wrong updates of {str(low).removeprefix('torch.')} parameters on a CPU in "
            f"torch {torch.__version__}, as a trial just showed; set optimizer.fused=false."
        )
    return optimizer


def _fused_sgd_is_right(dtype: torch.dtype) -> bool:
    """Whether three fused steps of low-precision parameters agree with plain ones; in torch 2.11 they don't."""

    def three_steps(fused: bool) -> Tensor:
        weights = nn.Parameter(torch.linspace(-1, 1, 64).to(dtype))
        optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, fused=fused)
        for _ in range(3):
            weights.grad = weights.detach().clone()
            optimizer.step()
        return weights.detach().float()

    return torch.allclose(three_steps(True), three_steps(False), atol=0.05)


class LearningRate:
    """Sets every parameter group's learning rate to its initial value times the schedule's factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule):
        self._optimizer, self._schedule = optimizer, schedule
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int, total: int) -> float:
        """Set the rate for this attempted step of `total`; return the first group's. InputError for a senseless one."""
        factor = _factor(self._schedule, step, total)
        groups = self._optimizer.param_groups  # asked for each time: a loaded state brings its own
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return groups[0]["lr"]


def check_schedule(schedule: Schedule, total_steps: int) -> None:
    """Try the first and the last step of a schedule; InputError if it fails there."""
    for step in (0, total_steps - 1):
        try:
            _factor(schedule, step, total_steps)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"scheduler: (step, total_steps) -> factor failed at step {step}: {error}.") from error


def _factor(schedule: Schedule, step: int, total_steps: int) -> float:
    factor = float(schedule(step, total_steps))
    if not 0 <= factor < math.inf:
        raise InputError(f"scheduler: the factor at step {step} is {factor}; it must be finite and not below 0.")
    return factor


class NonFiniteGuard:
    """Keeps what a non-finite step computed out of weights, optimizer state and buffers, in every precision.

    A fused optimizer takes the flag as `found_inf` and leaves weights and step counter alone,
    without a host sync (checked on 2.14.1: fused AdamW and SGD). Any other optimizer costs one
    sync a step. Floating-point buffers, such as batch-norm statistics, were written by forward
    already: they are put back by a select on the device.

    It stands in for `GradScaler.step`, which would use the scaler's own flag. Ours covers more: below
    a scale of 2^-127 the scaler's inverse is inf, and it calls gradients clean that unscaling made infinite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, only: list[str] | None = None):
        """`only`: the names of the buffers to guard, by `guarded`; None: all that are there."""
        self._optimizer, self._model = optimizer, model
        # GradScaler's own test for optimizers that take found_inf. MPS kernels do not take it.
        devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
        takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False) and devices <= {"cpu", "cuda"}
        self.syncs = not (takes_flag and _momentum_survives_a_skipped_first_step(optimizer))
        self._buffers = _BufferGroup.of(model, only)

    def guarded(self) -> list[str]:
        """Names of the buffers that are put back: one that forward makes later is not."""
        names = {id(module): name for name, module in self._model.named_modules()}
        return [f"{names[id(module)]}.{name}" for group in self._buffers for module, name in group.slots]

    def step(self, nonfinite: Tensor) -> None:
        """Step on unscaled gradients unless `nonfinite` (float32 scalar on the device, 0 or 1) says otherwise."""
        if not self.syncs:
            self._optimizer.found_inf = nonfinite
            self._optimizer.step()
            self._optimizer.found_inf = None
        elif not nonfinite.item():
            self._optimizer.step()
        for group in self._buffers:
            group.keep_old_where(nonfinite)


def _momentum_survives_a_skipped_first_step(optimizer: torch.optim.Optimizer) -> bool:
    """Give fused SGD a zero momentum buffer; say whether that leaves its arithmetic as it was.

    Left alone, fused SGD allocates the buffer without filling it and relies on the first step to
    write it. Where that step is skipped, the next one adds the garbage to the weights (2.14.1).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if group["momentum"] and group["dampening"]:
            return False  # the first step is not dampened, and from a zero buffer it would be
        for p in group["params"] if group["momentum"] else ():
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
    return True


class _BufferGroup:
    """Buffers of one dtype, kept as one flat copy: three kernels a step, however many there are.

    They are looked up by module and name at each step: forward, or a cast and back, may have put
    another tensor there. One that comes back in another shape is a cache, no statistic, and is let go.
    """

    def __init__(self, slots: list[tuple[nn.Module, str]]):
        self._keep(slots, [getattr(module, name) for module, name in slots])

    @classmethod
    def of(cls, model: nn.Module, only: list[str] | None) -> list["_BufferGroup"]:
        groups: dict[torch.dtype, list[tuple[nn.Module, str]]] = {}
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if only is not None and f"{path}.{name}" not in only:
                    continue
                if buffer.layout != torch.strided:  # a graph or a mask, no statistic
                    continue
                # an expanded buffer has fewer bytes than elements; nobody can write to it
                whole = buffer.untyped_storage().nbytes() >= buffer.numel() * buffer.element_size()
                if buffer.is_floating_point() and whole:
                    groups.setdefault(buffer.dtype, []).append((module, name))
        return [cls(slots) for slots in groups.values()]

    def _keep(self, slots: list[tuple[nn.Module, str]], values: list[Tensor]) -> None:
        self.slots = slots
        self._good = torch.cat([value.detach().reshape(-1) for value in values] or [torch.empty(0)])
        views = self._good.split([value.numel() for value in values])
        self._good_views = [view.view(value.shape) for view, value in zip(views, values, strict=True)]

    @torch.no_grad()
    def keep_old_where(self, nonfinite: Tensor) -> None:
        """Put the last good values back if `nonfinite` is 1, else take the current ones as good."""
        buffers = [getattr(module, name, None) for module, name in self.slots]
        fits = [
            b is not None and b.shape == good.shape and b.dtype is good.dtype
            for b, good in zip(buffers, self._good_views, strict=True)
        ]
        if not all(fits):
            self._keep(list(compress(self.slots, fits)), list(compress(self._good_views, fits)))
            buffers = list(compress(buffers, fits))
        if buffers:
            new = torch.cat([b.reshape(-1) for b in buffers])
            torch.where(nonfinite.bool(), self._good, new, out=self._good)
            torch._foreach_copy_(buffers, self._good_views)
