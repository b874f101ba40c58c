"""The training loop and the evaluation. One loop for all arms, without a branch on the precision.

In training, and with a fused optimizer, the host waits for the device where a window closes and
nowhere else: each step leaves its loss, gradient norm and non-finite flag on the device, and
`Window.read` fetches them together. Evaluation waits at every batch. Between two steps `Trainer.state`
is all that it takes to go on as if nothing had happened.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from precision_lab.checkpoint import load_model, load_optimizer, model_state
from precision_lab.config import PrecisionConfig, TrainerConfig
from precision_lab.errors import InputError
from precision_lab.hashing import Chain
from precision_lab.losses import Spikes
from precision_lab.meter import Meter
from precision_lab.optim import LearningRate, NonFiniteGuard, Schedule
from precision_lab.precision import Policy
from precision_lab.seeds import generator_states, restore_generators
from precision_lab.task import Task

BETWEEN_STEPS, EVALUATION = "between steps", "evaluation"


@dataclass
class Progress:
    """Where a run stands: brought up to date at every log point, on the host. Steps count from 1."""

    step: int = 0  # attempted
    nonfinite_steps: int = 0  # loss or gradient norm not finite
    skipped_steps: int = 0  # update not applied
    skips_in_a_row: int = 0
    loss_scale: float = 1.0
    first_nonfinite_step: int | None = None  # its loss or its gradient norm
    first_nonfinite_loss: int | None = None  # its step
    diverged: str | None = None  # the reason
    losses: Chain = field(default_factory=Chain)  # over every step's float32 loss
    spikes: Spikes = field(default_factory=Spikes)

    def advance(
        self, losses: numpy.ndarray, skipped: numpy.ndarray, loss_scale: float, limits: PrecisionConfig
    ) -> None:
        """Count the window's steps, one entry each in `losses` and `skipped`, and see whether the run diverged."""
        for loss in losses.astype("<f4"):
            self.losses.add(loss.tobytes())
        self.spikes.add(losses)
        nonfinite = skipped | ~numpy.isfinite(losses)
        self.first_nonfinite_step = self.first_nonfinite_step or self._first(nonfinite)
        self.first_nonfinite_loss = self.first_nonfinite_loss or self._first(~numpy.isfinite(losses))
        self.nonfinite_steps += int(nonfinite.sum())
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

    def end(self, val_loss: float) -> None:
        """See whether a run that took all its steps diverged all the same. `val_loss`: its last one, in float32."""
        if self.skipped_steps == self.step:
            self.diverged = self.diverged or f"none of {self.step} steps was finite, so no update was applied"
        if not math.isfinite(val_loss):
            self.diverged = self.diverged or f"the validation loss is {val_loss} after step {self.step}"

    def _first(self, flags: numpy.ndarray) -> int | None:
        """The number of the first step that is flagged in the window after `step`."""
        return self.step + 1 + int(flags.argmax()) if flags.any() else None

    def troubles(self) -> list[int]:
        """Steps before which a checkpoint is worth keeping: the first non-finite one, the first with a non-finite loss
        (a scaler's first skips come long before), and the first of those in a row.

        With none in a row that is the step after those read: whether it is finite is not known yet.
        """
        steps = (self.first_nonfinite_step, self.first_nonfinite_loss, self._streak_from())
        return [step for step in steps if step is not None]

    def nonfinite(self) -> dict[str, int | None]:
        """The steps to look at where something went wrong, as result.json keeps them."""
        return {
            "first_loss": self.first_nonfinite_loss,
            "first_step": self.first_nonfinite_step,
            "last_streak_from": self._streak_from() if self.skips_in_a_row else None,
        }

    def _streak_from(self) -> int:
        return self.step - self.skips_in_a_row + 1

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: what `of_state` takes."""
        nested = {"losses": self.losses.state, "spikes": self.spikes.state()}
        return {one.name: nested.get(one.name, getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Progress":
        known = {one.name for one in fields(cls)}  # other code may have had others
        values = state | {"losses": Chain(state["losses"]), "spikes": Spikes()}
        progress = cls(**{name: value for name, value in values.items() if name in known})
        progress.spikes.load_state(state["spikes"])
        return progress


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
        self.rate = LearningRate(optimizer, schedule)
        self.scaler = policy.grad_scaler()
        self.guard = NonFiniteGuard(optimizer, model)
        self.window = Window()
        self.done = 0  # steps attempted; `progress` knows of them at the next log point
        self.progress = Progress()
        self.unlogged: dict[str, float] | None = None  # readings of a log point that are not recorded yet
        self.phase = BETWEEN_STEPS  # or EVALUATION, or what a step is at: data, forward, backward, optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def step(self, batches: Iterator[Any]) -> None:
        """One optimizer step over `accumulation` micro-batches. The same for every precision."""
        n = self.plan.accumulation
        self.optimizer.zero_grad()
        for _ in range(n):
            self.phase = "data"
            batch = next(batches)
            self.phase = "forward"
            with self.policy.arithmetic():
                with self.policy.autocast():  # forward and loss, and nothing else
                    loss, _ = self.task(self.model, batch)
                self.phase = "backward"
                self.scaler.scale(loss / n if n > 1 else loss).backward()  # a division by 1 costs two kernels
            self.window.add_loss(loss)
        self.phase = "optimizer"
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self._parameters, self.plan.grad_clip)
        nonfinite = (grad_norm - grad_norm).ne_(0).float()  # 0 or 1: inf - inf and NaN - NaN are NaN
        with self.policy.arithmetic():
            self.guard.step(nonfinite)
        self.scaler.update()
        self.window.add_step(grad_norm, nonfinite)
        self.phase = BETWEEN_STEPS

    def train(
        self,
        batches: Iterator[Any],
        meter: Meter,
        total_steps: int,
        on_log: Callable[[Progress, dict[str, float]], None],
        wanted: Callable[[int], bool] = lambda done: False,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on until `total_steps` steps are done, or fewer if the run diverges.

        Calls `on_log` at every log point. `pause` is called after it, and after any other step that is `wanted`, by
        the number of steps done: outside the clock, and with a state that can be kept.
        """
        batches, step_ms = meter.timed(batches), []
        self.model.train()
        self._record(on_log)
        meter.start()
        while self.done < total_steps and not self.progress.diverged:
            lr = self.rate.set(self.done, total_steps)
            self.step(batches)
            self.done += 1
            meter.step(self.plan.batch_size * self.plan.accumulation)
            at_log_point = is_log_point(self.done, self.plan, total_steps)
            if at_log_point or wanted(self.done):
                step_ms += meter.close()
                if at_log_point:
                    self.unlogged = self.read_window() | {"train/lr": lr} | timing(step_ms)
                    self._record(on_log)
                    step_ms = []
                pause()
                meter.start()

    def _record(self, on_log: Callable[[Progress, dict[str, float]], None]) -> None:
        if self.unlogged is not None:
            on_log(self.progress, self.unlogged)
            self.unlogged = None

    def read_window(self) -> dict[str, float]:
        """What the steps since the last call measured; waits for the device."""
        progress = self.progress
        self.policy.check_float32()
        losses, norms, skipped = self.window.read()
        progress.advance(losses, skipped, self.scaler.get_scale(), self.policy.config)
        return {
            "train/loss": float(losses.mean()),
            "train/grad_norm": float(norms[-1]),
            "amp/loss_scale": progress.loss_scale,
            "amp/skipped_steps": progress.skipped_steps,
            "amp/nonfinite_steps": progress.nonfinite_steps,
        }

    def state(self) -> dict[str, Any]:
        """All that decides how training goes on but for batches and generators: plain values and tensors."""
        return {
            "done": self.done,
            "model": model_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": self.progress.state(),
            "window": self.window.state(),
            "unlogged": self.unlogged,
            "guarded": self.guard.guarded(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there. InputError where the model is another one or a part is lacking.

        Raises whatever an optimizer or module does that does not take its part; then the trainer is of no use any more.
        """
        if lacking := sorted(set(self.state()) - set(state)):
            raise InputError(f"The checkpoint lacks {', '.join(lacking)}: other code wrote it.")
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        # its copies are to be of the buffers as they are now, and of no others than before
        self.guard = NonFiniteGuard(self.optimizer, self.model, only=state["guarded"])
        self.done, self.unlogged = state["done"], state["unlogged"]
        self.progress = Progress.of_state(state["progress"])
        self.window.load_state(state["window"], self.policy.device)


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

    def last(self, accumulation: int) -> tuple[list[float], float, bool]:
        """Of the last step: the losses of its micro-batches, its gradient norm and whether it was skipped."""
        return [float(loss) for loss in self._losses[-accumulation:]], float(self._norms[-1]), bool(self._flags[-1])

    def state(self) -> list[list[Tensor]]:
        """What is not read yet, for a checkpoint."""
        return [[scalar.cpu() for scalar in kept] for kept in (self._losses, self._norms, self._flags)]

    def load_state(self, state: list[list[Tensor]], device: torch.device) -> None:
        self._losses, self._norms, self._flags = ([scalar.to(device) for scalar in kept] for kept in state)


def _fetch(scalars: list[Tensor]) -> numpy.ndarray:
    return torch.stack(scalars).float().cpu().numpy().astype("float64")


def evaluate(
    policy: Policy, task: Task, model: nn.Module, batches: Callable[[], Iterator[tuple[Any, int]]]
) -> dict[str, float]:
    """Mean loss and metrics over all validation samples, twice on the same weights.

    `val/loss` and the metrics in the arm's own precision, `val/loss_fp32` in IEEE float32.
    Leaves training mode, parameters and the global generators as they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    generators = generator_states(policy.device.type)
    model.eval()
    try:
        with torch.no_grad():
            with policy.arithmetic(), policy.autocast():
                own = _mean_over(task, model, batches())
            with policy.reference(model):
                reference = _mean_over(task, model, batches())
    finally:
        for module, training in modes:
            module.training = training
        restore_generators(generators, policy.device.type)
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
