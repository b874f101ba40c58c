"""One run, start to end: the only module that knows the order of things and owns the run's status."""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from precision_lab import folders, hardware, identity, open_sets
from precision_lab.assemble import (
    Assembly,
    Resolved,
    assemble,
    make_trainer,
    resolve,
    training_batches,
    validation_batches,
)
from precision_lab.batches import TrainBatches
from precision_lab.code import code_of
from precision_lab.config import Config, as_values
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.inspection import measure_memory, peak_by_kind
from precision_lab.losses import Curve
from precision_lab.meter import Meter
from precision_lab.recorder import Metric, Recorder
from precision_lab.redaction import redact, secrets_in
from precision_lab.seeds import derive, seed_globals
from precision_lab.stops import Stops, Terminated
from precision_lab.terminal import CHECKED, bar, summary_lines
from precision_lab.tracking import Mirror
from precision_lab.trainer import Progress, Trainer, evaluate, is_eval_point

log = logging.getLogger("precision_lab")


def run(asked: Config, sweep: bool = False) -> int:
    """Do what was asked and return the exit code: 0 done, 1 failed, 2 wrong input, 130 or 143 interrupted.

    A single run gets a folder of its own, once its input is known to be right: an InputError means
    that nothing was written. A job of a `sweep` has the folder its content names, which tells whatever
    became of it; it is left alone if it is finished, or being run by another process.
    """
    if sweep:
        _refuse_a_second_job()
    resolved = resolve(asked)
    asked, device = resolved.asked, resolved.device
    parts = None if sweep and not asked.check else _build(resolved)
    if asked.check:
        print(*resolved.notes, *parts[0].notes, f"{_title(asked)}: {CHECKED}", sep="\n")
        return 0
    environment = environment_of(device) | {"code": code_of(asked), "support": resolved.support}
    secrets = secrets_in(os.environ, as_values(asked), sys.argv)
    with Stops() as stops:
        if sweep:
            folder = folders.job_folder(asked, device.type)
            try:
                log_file, status = folders.claim(folder, asked.rerun, environment["fingerprint"])
            except folders.Busy:
                print(f"{_title(asked)}: being run by another process -> {folder}")
                return 0
            if status:
                print(f"{_title(asked)}: {status} before -> {folder}")
                return 1 if status == "failed" else 0
        else:
            folder = folders.new_folder(asked, device.type)
            log_file = folders.open_log(folder)
        recorder = Recorder(folder, secrets)
        recorder.status("running")
        with log_file, _logging_to(log_file, secrets):
            return _Run(resolved, parts, recorder, environment, secrets, stops).to_the_end()


_a_job_ran = False


def _refuse_a_second_job() -> None:
    global _a_job_ran
    if _a_job_ran:
        raise InputError(
            "This launcher runs several jobs in one process, where backend flags and memory peaks leak from one to "
            "the next; use hydra/launcher=isolated."
        )
    _a_job_ran = True


Parts = tuple[Assembly, Trainer, TrainBatches]


def _build(resolved: Resolved) -> Parts:
    ready = assemble(resolved)
    return ready, make_trainer(ready), training_batches(ready)


class _Run:
    """Training, evaluation and measuring, and the status whatever happens on the way."""

    def __init__(
        self,
        resolved: Resolved,
        parts: Parts | None,
        recorder: Recorder,
        environment: dict[str, Any],
        secrets: list[str],
        stops: Stops,
    ):
        self.resolved, self.parts, self.asked = resolved, parts, resolved.asked
        self.recorder, self.environment, self.secrets, self.stops = recorder, environment, secrets, stops
        self.progress = Progress()
        self.final: dict[str, float | None] = {}
        self.best: dict[str, float | None] = {}
        self.hashes: dict[str, str] = {}
        self.memory: dict[str, Any] | None = None
        self.curve = Curve()
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
        except (Exception, SystemExit) as error:  # sys.exit() in a model is no end of ours
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
        self.recorder.config(as_values(self.asked))
        self.recorder.environment(self.environment)
        for note in self.resolved.notes:
            log.info(note)
        log.info("%s -> %s", _title(self.asked), self.recorder.folder)
        self._start_mirror()
        ready, self.trainer, self.batches = self.parts or _build(self.resolved)
        self.ready = ready
        for note in ready.notes:
            log.info(note)
        if self.trainer.guard.syncs:
            optimizer = type(self.trainer.optimizer).__name__
            log.info("%s takes no flag to skip a step by: each step waits for the device", optimizer)
        self.environment |= {"backend_flags": ready.flags, "label_proof": ready.proof}
        self.recorder.environment(self.environment)
        self.recorder.metrics |= _task_metrics(ready.workload.task)
        self.hashes |= {"data": ready.workload.data.hash, "initial_weights": ready.workload.weights_hash}
        self.recorder.status("running", total_steps=ready.total_steps)

    def _start_mirror(self) -> None:
        asked, device = self.asked, self.resolved.device.type
        signature = identity.experiment_signature(asked)
        words = {
            "group": asked.wandb.group or (f"{asked.name}-{signature}" if asked.name else signature),
            "tags": [asked.precision.name, device, *asked.tags],
            "config": _mirror_config(asked, self.environment),
        }
        self.mirror = Mirror(
            replace(asked.wandb, project=redact(asked.wandb.project, self.secrets)),
            folders.outputs(asked),
            name=identity.slug(asked, device),
            job_type="train",
            **redact(words, self.secrets),
        )

    def _train_and_measure(self) -> None:
        asked, plan = self.asked, self.asked.trainer
        trainer, batches = self.trainer, self.batches
        validation = partial(validation_batches, self.ready)
        steps = self.ready.total_steps
        meter = Meter(trainer.policy.device, asked.meter.warmup_steps)
        seed_globals(derive(asked.seed, "dropout"))
        with bar(_title(asked), steps) as show:

            def on_log(progress: Progress, readings: dict[str, float]) -> None:
                self.progress = progress
                try:
                    self.stops.check()
                    if progress.diverged or is_eval_point(progress.step, plan, steps):
                        readings = readings | evaluate(trainer.policy, trainer.task, trainer.model, validation)
                        self.curve.add(progress.step, meter.train_s, readings["val/loss_fp32"])
                finally:  # what the window measured stands, whatever becomes of the evaluation
                    self._log(readings)
                show(progress.step, readings)

            try:
                trainer.train(batches, meter, steps, on_log)
            finally:  # an interrupted run keeps what it measured
                self.final |= meter.summary() | {"train/spike_score": self.progress.spikes.score}
                self.hashes |= {"batches": batches.order_hash(), "losses": self.progress.losses.hexdigest()[:16]}
        self.progress.diverged = self.progress.diverged or self._useless_end()
        if asked.probe.memory and not self.progress.diverged:
            self._measure_memory()

    def _measure_memory(self) -> None:
        try:
            batch = next(training_batches(self.ready))
            self.final |= measure_memory(self.trainer, batch, self.asked.device.compile)
            if not self.asked.device.compile:
                self.memory = peak_by_kind(self.trainer, batch)
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
        reason = redact(reason, self.secrets)  # an exception's words, which go to W&B too
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
            **{key: self.environment[key] for key in ("fingerprint", "support", "host", "versions", "git", "code")},
            finished=time.time(),
            overrides=[word for word in sys.argv[1:] if word.startswith("~") or ("=" in word and word[0] != "-")],
            memory=self.memory,
            curve=self.curve.stored(),
            config=as_values(asked),
        )
        self.recorder.status(status, reason=reason, step=progress.step)
        shown = f"{reason.rstrip('.')}; see {self.recorder.folder / 'train.log'}" if status == "failed" else reason
        log.info(summary_lines(identity.arm_label(asked.precision), status, shown, progress.step, self.final))
        if self.mirror:
            self.mirror.finish(status, reason, self.recorder.summary(self.final, self.best))
            self.recorder.status(status, reason=reason, step=progress.step, wandb=self.mirror.state)


def _title(asked: Config) -> str:
    arm, model, data = (
        identity.arm_label(asked.precision),
        open_sets.label(asked.model),
        open_sets.label(asked.dataset),
    )
    return f"{arm}: {model} on {data}, seed {asked.seed}"


@contextlib.contextmanager
def _logging_to(file: TextIO, secrets: list[str]) -> Iterator[None]:
    """The terminal and `file` get the same lines; tracebacks go to `file` alone."""
    written = logging.StreamHandler(file)
    written.setFormatter(_Redacting(secrets, "%(asctime)s %(levelname)s %(message)s"))
    handlers = [written]
    if not _is_stdout(file):  # a sweep keeps what its jobs print in their logs
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(_Redacting(secrets, "%(message)s"))
        screen.addFilter(lambda record: record.exc_info is None)
        handlers.append(screen)
    loggers = [log, logging.getLogger("py.warnings")]
    logging.raiseExceptions = False  # a closed terminal is no reason to print stacks
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.handlers = handlers
        logger.propagate = False
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.handlers = []


def _is_stdout(file: TextIO) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # closed, replaced, or none at all
        return False


class _Redacting(logging.Formatter):
    """An exception may quote a secret."""

    def __init__(self, secrets: list[str], template: str):
        super().__init__(template)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), self._secrets)


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
        "model": open_sets.label(asked.model),
        "dataset": open_sets.label(asked.dataset),
        "device_name": environment["fingerprint"]["model"],
        "seed": asked.seed,
        "compile": asked.device.compile,
        "torch_version": environment["versions"]["torch"],
        "git_sha": environment["git"]["sha"],
    }
    return flat | {"config": as_values(asked)}
