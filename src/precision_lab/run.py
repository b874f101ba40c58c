"""One run, start to end: the only module that knows the order of things and owns the run's status."""

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from precision_lab import config, hardware, identity, targets
from precision_lab.batches import TrainBatches, eval_batches, place_on
from precision_lab.config import Config
from precision_lab.environment import environment
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.meter import Meter
from precision_lab.optim import build_optimizer
from precision_lab.precision import Policy
from precision_lab.probe.memory import cpu_step_peak_bytes, saved_activations
from precision_lab.recorder import Metric, Recorder, redact, secrets_in
from precision_lab.seeds import derive, seed_globals
from precision_lab.task import Workload, build
from precision_lab.terminal import bar, summary_line
from precision_lab.tracking import Mirror
from precision_lab.trainer import Progress, Trainer, evaluate

log = logging.getLogger("precision_lab")


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that no handler between mistakes it for a failure."""


def run(asked: Config) -> int:
    """Do what was asked and return the exit code: 0 done, 1 failed, 130 or 143 interrupted.

    InputError before anything was written means exit code 2 and no folder.
    """
    device = hardware.select_device(asked.device)
    support = hardware.dtype_support(device)
    notes = [hardware.describe(device, support)]
    if asked.precision.name == "auto":
        arm, reason = hardware.choose_precision(device, support)
        asked = replace(asked, precision=config.load_precision(arm))
        notes.append(f"precision=auto: {arm}, since {reason}")
    notes += _emulation_notes(asked, device, support)
    policy = Policy(asked.precision, device)
    flags = policy.apply_backends()
    proof = policy.prove()
    workload = build(asked)
    if asked.check:
        print("\n".join([*notes, f"{_title(asked)}: the input is right; nothing was trained (check=true)."]))
        return 0
    folder = _make_folder(asked, device)
    with _logging_to(folder / "train.log"):
        for note in notes:
            log.info(note)
        log.info("%s -> %s", _title(asked), folder)
        recorder = Recorder(folder, _task_metrics(workload.task))
        recorder.config(identity.as_values(asked))
        facts = environment(device) | {"support": support, "backend_flags": flags, "label_proof": proof}
        recorder.environment(facts)
        return _Run(asked, policy, workload, recorder, facts).to_the_end()


class _Run:
    """Training, evaluation and measuring, and the status whatever happens on the way."""

    def __init__(self, asked: Config, policy: Policy, workload: Workload, recorder: Recorder, facts: dict[str, Any]):
        self.asked, self.policy, self.workload, self.recorder = asked, policy, workload, recorder
        self.facts = facts  # what environment.json holds
        self.progress = Progress()
        self.final: dict[str, float | None] = {}
        self.best: dict[str, float | None] = {}
        self.hashes = {
            "data": workload.data.hash,
            "initial_weights": content_hash(workload.model.state_dict()),
        }
        self.mirror = Mirror(
            asked.wandb,
            Path(asked.paths.outputs) / "wandb",
            name=identity.slug(asked, policy.device.type),
            group=asked.wandb.group or identity.experiment_signature(asked),
            job_type="train",
            tags=[asked.precision.name, policy.device.type, *asked.tags],
            config=_mirror_config(asked, facts),
        )

    def to_the_end(self) -> int:
        """Run and return the exit code; every way out leaves status.json and result.json."""
        self.recorder.status("running", wandb=self.mirror.state)
        code = 0
        try:
            with _sigterm_raises():
                self._train_and_measure()
            status, reason = ("diverged", self.progress.diverged) if self.progress.diverged else ("completed", None)
        except KeyboardInterrupt:
            status, reason, code = "interrupted", "Ctrl-C", 130
        except Terminated:
            status, reason, code = "interrupted", "SIGTERM", 143
        except InputError as error:
            status, reason, code = "failed", str(error), 2
        except Exception as error:
            if is_out_of_memory(error):
                status, reason = "out_of_memory", str(error).split("\n")[0]
            else:
                status, reason, code = "failed", f"{type(error).__name__}: {str(error).split(chr(10))[0]}", 1
            log.exception("the run stopped")
        self._finish(status, reason)
        return code

    def _train_and_measure(self) -> None:
        asked, policy, data, plan = self.asked, self.policy, self.workload.data, self.asked.trainer
        place = place_on(policy.device, asked.device.channels_last)
        batches = TrainBatches(data.train, plan.batch_size, derive(asked.seed, "order"), place, plan.workers)
        steps = plan.steps or plan.epochs * max(1, len(data.train) // (plan.batch_size * plan.accumulation))
        trainer = self._make_trainer()
        meter = Meter(policy.device, asked.meter.warmup_steps)
        validation = partial(eval_batches, data.val, plan.batch_size, place, plan.workers)
        seed_globals(derive(asked.seed, "dropout"))
        with bar(_title(asked), steps) as show:

            def on_log(progress: Progress, readings: dict[str, float]) -> None:
                self.progress = progress
                last = progress.step == steps or progress.diverged
                if last or (plan.eval_every and progress.step % plan.eval_every == 0):
                    readings = readings | evaluate(policy, trainer.task, trainer.model, validation)
                self._log(readings)
                show(progress.step, readings)

            trainer.train(batches, meter, steps, on_log)
        self.final |= meter.summary()
        self.hashes |= {"batches": batches.order_hash(), "losses": self.progress.losses.hexdigest()[:16]}
        self.progress.diverged = self.progress.diverged or self._useless_end()
        if asked.probe.memory and not self.progress.diverged:
            first = TrainBatches(data.train, plan.batch_size, derive(asked.seed, "order"), place)
            self.final |= measure_memory(trainer, next(first))

    def _make_trainer(self) -> Trainer:
        asked, policy = self.asked, self.policy
        memory_format = torch.channels_last if asked.device.channels_last else torch.preserve_format
        model = policy.prepare(self.workload.model.to(policy.device, memory_format=memory_format))
        optimizer = build_optimizer(asked.optimizer, model)
        if asked.device.compile:
            model = torch.compile(model)
        schedule = targets.bind("scheduler", asked.scheduler)
        trainer = Trainer(asked.trainer, policy, self.workload.task, model, optimizer, schedule)
        if trainer.guard.syncs:
            log.info(
                "%s takes no flag to skip a step by; each step waits for the device once.",
                type(optimizer).__name__,
            )
        return trainer

    def _log(self, readings: dict[str, float]) -> None:
        self.recorder.log(self.progress.step, readings)
        self.mirror.log({"train/step": self.progress.step, **readings})
        self.final |= readings
        for name, value in readings.items():
            better = self.recorder.metrics[name].better
            if name.startswith("val/") and better and math.isfinite(value):
                pick = min if better == "lower" else max
                self.best[name] = pick(value, self.best.get(name, value))

    def _useless_end(self) -> str | None:
        """Why a run that took all its steps has no result all the same."""
        if self.progress.skipped_steps == self.progress.step:
            return f"none of {self.progress.step} steps was finite, so no update was applied"
        if not math.isfinite(self.final["val/loss_fp32"]):
            return f"the validation loss is {self.final['val/loss_fp32']} after step {self.progress.step}"
        return None

    def _finish(self, status: str, reason: str | None) -> None:
        asked, progress = self.asked, self.progress
        self.recorder.result(
            self.final,
            self.best,
            status=status,
            reason=reason,
            step=progress.step,
            applied_steps=progress.step - progress.skipped_steps,
            arm=identity.arm_label(asked.precision),
            seed=asked.seed,
            experiment_signature=identity.experiment_signature(asked),
            run_signature=identity.run_signature(asked),
            hashes=self.hashes,
            fingerprint=self.facts["fingerprint"],
            versions=self.facts["versions"],
            config=identity.as_values(asked),
        )
        self.mirror.finish(status, self.recorder.summary(self.final, self.best))
        self.recorder.status(status, reason=reason, step=progress.step, wandb=self.mirror.state)
        log.info(summary_line(identity.arm_label(asked.precision), status, reason, progress.step, self.final))


def measure_memory(trainer: Trainer, batch: Any) -> dict[str, float]:
    """Memory of one more step, after training and its evaluation: nothing that counts can be disturbed.

    Saved activations on every device; the peak on a CPU alone, from the allocator's events
    (elsewhere the allocator keeps its own peak).
    """
    inputs = [item for item in (batch if isinstance(batch, tuple | list) else [batch]) if torch.is_tensor(item)]

    def forward() -> torch.Tensor:
        with trainer.policy.autocast():
            return trainer.task(trainer.model, batch)[0]

    trainer.model.train()
    saved = saved_activations(trainer.model, forward, exclude=inputs)
    figures = {
        "mem/saved_activations_mib": saved.activations_bytes / 2**20,
        "mem/saved_weight_casts_mib": saved.weight_casts_bytes / 2**20,
    }
    if trainer.policy.device.type == "cpu":
        state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
        alive = [
            *trainer.model.parameters(),
            *trainer.model.buffers(),
            *filter(torch.is_tensor, state),
            *inputs,
        ]
        trainer.optimizer.zero_grad()
        peak = cpu_step_peak_bytes(lambda: trainer.step(itertools.repeat(batch)), alive)
        figures["mem/peak_allocated_gib"] = peak / hardware.GIB
    return figures


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory; torch's CPU allocator has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _emulation_notes(asked: Config, device: torch.device, support: dict[str, str]) -> list[str]:
    notes = []
    for name in hardware.check_support(asked.precision, device, support):
        ratio = hardware.slowdown(getattr(torch, name), device)
        notes.append(
            f"{name} has no units of its own here: a 256 x 256 matmul was measured just now to take "
            f"{ratio:.3g} times as long as in float32. Expect no gain in speed."
        )
    return notes


def _title(asked: Config) -> str:
    arm, model, data = (
        identity.arm_label(asked.precision),
        config.label(asked.model),
        config.label(asked.dataset),
    )
    return f"{arm}: {model} on {data}, seed {asked.seed}"


def _make_folder(asked: Config, device: torch.device) -> Path:
    now = datetime.now()
    name = f"{now:%H-%M-%S-%f}_{identity.slug(asked, device.type)}"
    folder = Path(asked.paths.outputs) / "runs" / f"{now:%Y-%m-%d}" / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"The run folder {folder} cannot be made ({error.strerror}); set paths.outputs.") from error
    return folder


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """The terminal and `path` get the same lines; tracebacks go to `path` alone."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stdout)
    screen.addFilter(lambda record: record.exc_info is None)
    loggers = [log, logging.getLogger("py.warnings")]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.handlers = [file, screen]
        logger.propagate = False
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.handlers = []
        file.close()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _task_metrics(task: Any) -> dict[str, Metric]:
    """`val/<name>` for what a task says it measures: `metrics = {"mae": ("dollars", "lower")}`."""
    stated = getattr(task, "metrics", {})
    return {f"val/{name}": Metric(unit, better) for name, (unit, better) in stated.items()}


def _mirror_config(asked: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """The config for W&B: what runs are filtered by stands at the top level, under plain names."""
    flat = {
        "precision": identity.arm_label(asked.precision),
        "model": config.label(asked.model),
        "dataset": config.label(asked.dataset),
        "device_name": facts["fingerprint"]["model"],
        "seed": asked.seed,
        "compile": asked.device.compile,
        "torch_version": facts["versions"]["torch"],
        "git_sha": facts["git"]["sha"],
    }
    return flat | {"config": redact(identity.as_values(asked), secrets_in(os.environ))}
