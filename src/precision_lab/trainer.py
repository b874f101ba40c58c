"""The training loop and the evaluation. One loop for all arms, without a branch on the precision.

In training, and with a fused optimizer, the host waits for the device where a window closes and
nowhere else: each step leaves its loss, gradient norm and non-finite flag on the device, and
`Window.read` fetches them together. Evaluation waits at every batch.
"""

import hashlib
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from precision_lab.config import PrecisionConfig, TrainerConfig
from precision_lab.errors import InputError
from precision_lab.losses import Spikes
from precision_lab.meter import Meter
from precision_lab.optim import LearningRate, NonFiniteGuard, Schedule
from precision_lab.precision import Policy
from precision_lab.task import Task


@dataclass
class Progress:
    """Where a run stands: brought up to date at every log point, on the host. Steps count from 1."""

    step: int = 0  # attempted
    nonfinite_steps: int = 0  # loss or gradient norm not finite
    skipped_steps: int = 0  # update not applied
    skips_in_a_row: int = 0
    loss_scale: float = 1.0
    diverged: str | None = None  # the reason
    losses: "hashlib._Hash" = field(default_factory=hashlib.sha256)  # over every step's float32 loss
    spikes: Spikes = field(default_factory=Spikes)

    def advance(
        self, losses: numpy.ndarray, skipped: numpy.ndarray, loss_scale: float, limits: PrecisionConfig
    ) -> None:
        """Count the window's steps, one entry each in `losses` and `skipped`, and see whether the run diverged."""
        self.losses.update(losses.astype("<f4").tobytes())
        self.spikes.add(losses)
        self.nonfinite_steps += int((skipped | ~numpy.isfinite(losses)).sum())
        self.skipped_steps += int(skipped.sum())
        self.loss_scale = loss_scale
        for skip in skipped:
            self.step += 1
            self.skips_in_a_row = self.skips_in_a_row + 1 if skip else 0
            if self.skips_in_a_row > limits.max_consecutive_skips and not self.diverged:
                self.diverged = (
                    f"more than precision.max_consecutive_skips={limits.max_consecutive_skips} non-finite steps "
                    f"in a row, from step {self.step - self.skips_in_a_row + 1} on"
                )
        if limits.grad_scaling and loss_scale < limits.min_scale and not self.diverged:
            self.diverged = (
                f"loss scale {loss_scale:g} fell below precision.min_scale={limits.min_scale:g} by step {self.step}"
            )


class Trainer:
    """One arm's model, optimizer and scaler, and the step that all arms share."""

    def __init__(
        self,
        plan: TrainerConfig,
        policy: Policy,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
    ):
        self.plan, self.policy, self.task, self.model, self.optimizer = plan, policy, task, model, optimizer
        self.schedule = schedule
        self.scaler = policy.grad_scaler()
        self.guard = NonFiniteGuard(optimizer, model)
        self.window = Window()
        self.phase = "forward"  # or backward, optimizer: what a step was at, where it fails
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def step(self, batches: Iterator[Any]) -> None:
        """One optimizer step over `accumulation` micro-batches. The same for every precision."""
        n = self.plan.accumulation
        self.optimizer.zero_grad()
        for _ in range(n):
            batch = next(batches)
            self.phase = "forward"
            with self.policy.autocast():  # forward and loss, and nothing else
                loss, _ = self.task(self.model, batch)
            self.phase = "backward"
            self.scaler.scale(loss / n if n > 1 else loss).backward()  # a division by 1 costs two kernels
            self.window.add_loss(loss)
        self.phase = "optimizer"
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self._parameters, self.plan.grad_clip)
        nonfinite = (grad_norm - grad_norm).ne_(0).float()  # 0 or 1: inf - inf and NaN - NaN are NaN
        self.guard.step(nonfinite)
        self.scaler.update()
        self.window.add_step(grad_norm, nonfinite)

    def train(
        self,
        batches: Iterator[Any],
        meter: Meter,
        total_steps: int,
        on_log: Callable[[Progress, dict[str, float]], None],
    ) -> None:
        """Take `total_steps` steps, or fewer if the run diverges. Calls `on_log` at every log point."""
        progress, batches = Progress(), meter.timed(batches)
        rate = LearningRate(self.optimizer, self.schedule, total_steps)
        self.model.train()
        meter.start()
        for step in range(total_steps):
            lr = rate.set(step)
            self.step(batches)
            meter.step(self.plan.batch_size * self.plan.accumulation)
            if is_log_point(step + 1, self.plan, total_steps):
                step_ms = meter.close()
                on_log(progress, self._read_window(progress) | {"train/lr": lr} | timing(step_ms))
                if progress.diverged:
                    return
                meter.start()

    def _read_window(self, progress: Progress) -> dict[str, float]:
        self.policy.check_float32_modules()
        losses, norms, skipped = self.window.read()
        progress.advance(losses, skipped, self.scaler.get_scale(), self.policy.config)
        return {
            "train/loss": float(losses.mean()),
            "train/grad_norm": float(norms[-1]),
            "amp/loss_scale": progress.loss_scale,
            "amp/skipped_steps": progress.skipped_steps,
            "amp/nonfinite_steps": progress.nonfinite_steps,
        }


def is_log_point(done: int, plan: TrainerConfig, total_steps: int) -> bool:
    """Whether the host reads the device after `done` steps."""
    return done % plan.log_every == 0 or is_eval_point(done, plan, total_steps)


def is_eval_point(done: int, plan: TrainerConfig, total_steps: int) -> bool:
    """Whether the validation set is evaluated after `done` steps."""
    return done == total_steps or (plan.eval_every is not None and done % plan.eval_every == 0)


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip to `max_norm` if there is one; return the L2 norm before clipping, without a host sync.

    The arithmetic of torch.nn.utils.clip_grad_norm_, bit for bit. That one sorts the gradients by
    device and dtype twice a step, which costs 2 % of a 2 ms step; here all are of one kind.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise InputError("No parameter received a gradient; the task's loss does not depend on the model.")
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if max_norm is not None:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def timing(step_ms: list[float]) -> dict[str, float]:
    """The window's median step time, if it held a measured step."""
    return {"perf/step_ms_p50": statistics.median(step_ms)} if step_ms else {}


class Window:
    """What the steps since the last log point left on the device."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._flags: list[Tensor] = []

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def add_step(self, grad_norm: Tensor, nonfinite: Tensor) -> None:
        self._norms.append(grad_norm)
        self._flags.append(nonfinite)

    def read(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Fetch all at once, and start anew: loss, gradient norm and whether it was skipped, one entry a step."""
        losses = _fetch(self._losses).reshape(len(self._flags), -1).mean(1)  # over a step's micro-batches
        norms, flags = _fetch(self._norms), _fetch(self._flags)
        for kept in (self._losses, self._norms, self._flags):
            kept.clear()
        return losses, norms, flags != 0


def _fetch(scalars: list[Tensor]) -> numpy.ndarray:
    return torch.stack(scalars).float().cpu().numpy().astype("float64")


def evaluate(
    policy: Policy, task: Task, model: nn.Module, batches: Callable[[], Iterator[tuple[Any, int]]]
) -> dict[str, float]:
    """Mean loss and metrics over all validation samples, twice on the same weights.

    `val/loss` and the metrics in the arm's own precision, `val/loss_fp32` in IEEE float32.
    Leaves training mode, parameters and the generators of CPU and CUDA as they were. MPS's is not
    put back: a model that draws there in evaluation moves it on.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = [policy.device] if policy.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            with policy.autocast():
                own = _mean_over(task, model, batches())
            with policy.reference(model):
                reference = _mean_over(task, model, batches())
    finally:
        for module, training in modes:
            module.training = training
    return {f"val/{name}": value for name, value in own.items()} | {"val/loss_fp32": reference["loss"]}


def _mean_over(task: Task, model: nn.Module, batches: Iterator[tuple[Any, int]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}  # of samples; a task may leave out a metric that a batch does not tell
    for batch, samples in batches:
        loss, metrics = task(model, batch)
        if bad := [name for name in metrics if not re.fullmatch(r"[A-Za-z]\w*", name) or name.startswith("loss")]:
            raise InputError(
                f"task: a metric is called {bad[0]!r}; use letters, digits and underscores, not beginning with loss."
            )
        for name, value in {"loss": loss, **metrics}.items():
            # summed on the host in float64: MPS has none, and a bfloat16 sum stops growing
            sums[name] = sums.get(name, 0.0) + float(value) * samples
            counts[name] = counts.get(name, 0) + samples
    return {name: value / counts[name] for name, value in sums.items()}
