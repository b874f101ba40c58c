"""A trainer of one arm around a test's own model and task, and tiny modules to put into it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from precision_lab.config import TrainerConfig, load_precision
from precision_lab.meter import Meter
from precision_lab.optim import constant
from precision_lab.precision import Policy
from precision_lab.trainer import Progress, Trainer

CPU = torch.device("cpu")
ARMS = ("fp32", "bf16", "fp16", "fp16_unscaled", "bf16_pure")
LOSS_SCALING = ("fp16",)


def policy_of(arm: str, device: torch.device = CPU, **changes: Any) -> Policy:
    return Policy(replace(load_precision(arm), **changes), device)


def trainer_of(
    arm: str,
    model: nn.Module,
    task: Callable,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    schedule: Callable[[int, int], float] | None = None,
    device: torch.device = CPU,
    precision: dict[str, Any] | None = None,
    **plan: Any,
) -> Trainer:
    """The arm as `conf/precision` states it, but for `precision`; constant rate, no clipping, one micro-batch."""
    policy = policy_of(arm, device, **(precision or {}))
    policy.apply_backends()
    model = policy.prepare(model.to(device))
    made = (optimizer or fused_adamw)(model.parameters())
    stated = {"steps": None, "epochs": 1, "batch_size": 4, "accumulation": 1, "grad_clip": None}
    stated |= {"log_every": 10**9, "eval_every": None, "workers": 0}
    stated |= {"init_from": None, "resume": "auto", "checkpoint_every": None, "checkpoint_minutes": None}
    rate = schedule or (lambda step, total: constant(step, total, 0))
    return Trainer(TrainerConfig(**(stated | plan)), policy, task, model, made, rate)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def train(trainer: Trainer, batches: Iterable[Any], steps: int) -> tuple[Progress, list[dict[str, float]]]:
    """Run `Trainer.train`; the last progress, and the readings of every log point."""
    progress, readings = Progress(), []

    def on_log(now: Progress, figures: dict[str, float]) -> None:
        nonlocal progress
        progress = now
        readings.append(figures)

    trainer.train(iter(batches), Meter(trainer.policy.device, 0), steps, on_log)
    return progress, readings


def step(trainer: Trainer, batch: Any) -> None:
    """One optimizer step in which every micro-batch is `batch`."""
    trainer.model.train()
    trainer.step(repeat(batch))


def mean_square(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return model(batch).float().square().mean(), {}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if torch.is_tensor(value))


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor], but: tuple[str, ...] = ()) -> bool:
    """Whether two snapshots are equal bit for bit; NaN equals the same NaN."""
    assert left.keys() == right.keys()
    names = [name for name in left if not name.endswith(but)] if but else list(left)
    assert names
    return all(_bytes(left[name]) == _bytes(right[name]) for name in names)


def _bytes(value: Tensor) -> bytes:
    return str(value.dtype).encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


class BadBackward(torch.autograd.Function):
    """Identity whose gradient has one value replaced: the loss stays finite, the gradient does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        bad = grad.clone()
        bad.view(-1)[0] = ctx.value
        return bad, None


class TwoHeads(nn.Module):
    """Two linears side by side. The gradient of the second can be spoiled by attribute `bad`, e.g. inf."""

    def __init__(self) -> None:
        super().__init__()
        self.clean, self.spoiled = nn.Linear(4, 3), nn.Linear(4, 3)
        self.bad: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        second = self.spoiled(x)
        if self.bad is not None:
            second = BadBackward.apply(second, self.bad)
        return self.clean(x) + second


class ConvNorm(nn.Module):
    """Conv1d, batch norm, linear: [B, 2, 8] -> [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1))


def seeded(build: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()
