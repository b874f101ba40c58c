"""One run, start to end: the only module that knows the order of things and owns the run's status."""

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from precision_lab import config, hardware, identity
from precision_lab.assemble import Assembly, assemble, make_trainer, training_batches
from precision_lab.batches import TrainBatches, eval_batches
from precision_lab.config import Config
from precision_lab.environment import environment
from precision_lab.errors import InputError
from precision_lab.inspection import measure_memory
from precision_lab.meter import Meter
from precision_lab.recorder import Metric, Recorder, redact, secrets_in
from precision_lab.seeds import derive, seed_globals
from precision_lab.terminal import bar, summary_lines
from precision_lab.tracking import Mirror
from precision_lab.trainer import Progress, Trainer, evaluate, is_eval_point

log = logging.getLogger("precision_lab")


class Terminated(BaseException):
    """A signal to stop arrived. Not an Exception, so that no handler between mistakes it for a failure."""


def run(asked: Config) -> int:
    """Do what was asked and return the exit code: 0 done, 1 failed, 130 or 143 interrupted.

    InputError before anything was written means exit code 2 and no folder.
    """
    ready = assemble(asked)
    trainer, batches = make_trainer(ready), training_batches(ready)
    if asked.check:
        print(*ready.notes, f"{_title(ready.asked)}: the input is right; nothing was trained.", sep="\n")
        return 0
    surroundings = environment(ready.policy.device)
    metrics = _task_metrics(ready.workload.task)
    with _Stops() as stops:
        recorder = Recorder(_make_folder(ready), metrics)
        recorder.status("running")
        with _logging_to(recorder.folder / "train.log"):
            return _Run(ready, trainer, batches, recorder, surroundings, stops).to_the_end()


class _Run:
    """Training, evaluation and measuring, and the status whatever happens on the way."""

    def __init__(
        self,
        ready: Assembly,
        trainer: Trainer,
        batches: TrainBatches,
        recorder: Recorder,
        surroundings: dict[str, Any],
        stops: "_Stops",
    ):
        self.ready, self.asked = ready, ready.asked
        self.trainer, self.batches, self.recorder, self.stops = trainer, batches, recorder, stops
        self.environment = surroundings | {
            "support": ready.support,
            "backend_flags": ready.flags,
            "label_proof": ready.proof,
        }
        self.progress = Progress()
        self.final: dict[str, float | None] = {}
        self.best: dict[str, float | None] = {}
        self.hashes = {"data": ready.workload.data.hash, "initial_weights": ready.workload.weights_hash}
        self.mirror: Mirror | None = None

    def to_the_end(self) -> int:
        """Run and return the exit code; every way out leaves status.json and result.json."""
        code = 0
        try:
            self.stops.release()
            self._begin()
            self._train_and_measure()
            self.stops.hold()
            status, reason = ("diverged", self.progress.diverged) if self.progress.diverged else ("completed", None)
        except Terminated as stop:
            self.stops.hold()
            status, reason = "interrupted", str(stop)
            code = 130 if reason == "Ctrl-C" else 143
        except Exception as error:
            self.stops.hold()
            first_line = str(error).split("\n")[0]
            if hardware.is_out_of_memory(error):
                status, reason = "out_of_memory", first_line
            elif isinstance(error, InputError):
                status, reason, code = "failed", first_line, 2
            else:
                status, reason, code = "failed", f"{type(error).__name__}: {first_line}", 1
            log.exception("the run stopped")
        self._finish(status, reason)
        return code

    def _begin(self) -> None:
        self.recorder.config(identity.as_values(self.asked))
        self.recorder.environment(self.environment)
        for note in self.ready.notes:
            log.info(note)
        log.info("%s -> %s", _title(self.asked), self.recorder.folder)
        if self.trainer.guard.syncs:
            optimizer = type(self.trainer.optimizer).__name__
            log.info("%s takes no flag to skip a step by: each step waits for the device", optimizer)
        device = self.trainer.policy.device.type
        words = {
            "group": self.asked.wandb.group or identity.experiment_signature(self.asked),
            "tags": [self.asked.precision.name, device, *self.asked.tags],
            "config": _mirror_config(self.asked, self.environment),
        }
        self.mirror = Mirror(
            self.asked.wandb,
            Path(self.asked.paths.outputs),
            name=identity.slug(self.asked, device),
            job_type="train",
            **redact(words, secrets_in(os.environ)),
        )

    def _train_and_measure(self) -> None:
        asked, plan, data = self.asked, self.asked.trainer, self.ready.workload.data
        trainer, batches = self.trainer, self.batches
        validation = partial(eval_batches, data.val, plan.batch_size, self.ready.place, plan.workers)
        steps = self.ready.total_steps
        meter = Meter(trainer.policy.device, asked.meter.warmup_steps)
        seed_globals(derive(asked.seed, "dropout"))
        with bar(_title(asked), steps) as show:

            def on_log(progress: Progress, readings: dict[str, float]) -> None:
                self.stops.check()
                self.progress = progress
                if progress.diverged or is_eval_point(progress.step, plan, steps):
                    readings = readings | evaluate(trainer.policy, trainer.task, trainer.model, validation)
                self._log(readings)
                show(progress.step, readings)

            try:
                trainer.train(batches, meter, steps, on_log)
            finally:  # an interrupted run keeps what it measured
                self.final |= meter.summary()
                self.hashes |= {"batches": batches.order_hash(), "losses": self.progress.losses.hexdigest()[:16]}
        self.progress.diverged = self.progress.diverged or self._useless_end()
        if asked.probe.memory and not self.progress.diverged:
            self._measure_memory()

    def _measure_memory(self) -> None:
        batch = next(training_batches(self.ready))
        try:
            self.final |= measure_memory(self.trainer, batch, self.asked.device.compile)
        except Exception as error:  # the run is complete without it
            log.warning("memory could not be measured: %s: %s", type(error).__name__, str(error).split("\n")[0])

    def _log(self, readings: dict[str, float]) -> None:
        self.recorder.log(self.progress.step, readings)
        if self.mirror:
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
            fingerprint=self.environment["fingerprint"],
            versions=self.environment["versions"],
            config=identity.as_values(asked),
        )
        self.recorder.status(status, reason=reason, step=progress.step)
        shown = f"{reason}; see {self.recorder.folder / 'train.log'}" if status == "failed" else reason
        log.info(summary_lines(identity.arm_label(asked.precision), status, shown, progress.step, self.final))
        if self.mirror:
            self.mirror.finish(status, self.recorder.summary(self.final, self.best))
            self.recorder.status(status, reason=reason, step=progress.step, wandb=self.mirror.state)


def _title(asked: Config) -> str:
    arm, model, data = (
        identity.arm_label(asked.precision),
        config.label(asked.model),
        config.label(asked.dataset),
    )
    return f"{arm}: {model} on {data}, seed {asked.seed}"


def _make_folder(ready: Assembly) -> Path:
    now = datetime.now()
    name = f"{now:%H-%M-%S-%f}_{identity.slug(ready.asked, ready.policy.device.type)}"
    folder = Path(ready.asked.paths.outputs) / "runs" / f"{now:%Y-%m-%d}" / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"The run folder {folder} cannot be made ({error.strerror}); set paths.outputs.") from error
    return folder


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """The terminal and `path` get the same lines; tracebacks go to `path` alone."""
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stdout)
    screen.setFormatter(_Redacting("%(message)s"))
    screen.addFilter(lambda record: record.exc_info is None)
    loggers = [log, logging.getLogger("py.warnings")]
    logging.raiseExceptions = False  # a closed terminal is no reason to print stacks
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


class _Redacting(logging.Formatter):
    """An exception may quote a secret."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), secrets_in(os.environ))


class _Stops:
    """SIGINT, SIGTERM and SIGHUP, raised as Terminated where the run can say so, and held back elsewhere.

    Held at first, while the folder is made, and again while the result is written.
    """

    def __init__(self) -> None:
        self._numbers = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
        self._before: dict[int, Any] = {}
        self._arrived: str | None = None
        self._held = True

    def __enter__(self) -> "_Stops":
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self._arrived = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self._held:
            self.check()

    def check(self) -> None:
        """Raise Terminated if a signal arrived: one may have been raised where exceptions are swallowed."""
        if self._arrived:
            raise Terminated(self._arrived)

    def release(self) -> None:
        """From now on a signal raises."""
        self._held = False
        self.check()

    def hold(self) -> None:
        """From now on a signal waits, for ever if nobody asks."""
        self._held = True


def _task_metrics(task: Any) -> dict[str, Metric]:
    """`val/<name>` for what a task says it measures: `metrics = {"mae": ("dollars", "lower")}`."""
    try:
        stated = {f"val/{name}": Metric(unit, better) for name, (unit, better) in getattr(task, "metrics", {}).items()}
        if all(metric.better in ("lower", "higher", None) for metric in stated.values()):
            return stated
    except (TypeError, ValueError, AttributeError):  # not a mapping of names to pairs
        pass
    raise InputError('task: metrics must be like {"mae": ("dollars", "lower")}, with lower, higher or None.')


def _mirror_config(asked: Config, environment: dict[str, Any]) -> dict[str, Any]:
    """The config for W&B: what runs are filtered by stands at the top level, under plain names."""
    flat = {
        "precision": identity.arm_label(asked.precision),
        "model": config.label(asked.model),
        "dataset": config.label(asked.dataset),
        "device_name": environment["fingerprint"]["model"],
        "seed": asked.seed,
        "compile": asked.device.compile,
        "torch_version": environment["versions"]["torch"],
        "git_sha": environment["git"]["sha"],
    }
    return flat | {"config": identity.as_values(asked)}
