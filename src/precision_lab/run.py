"""One run, start to end: the only module that knows the order of things and owns the run's status."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from precision_lab import folders, hardware, identity
from precision_lab.assemble import (
    Assembly,
    Parts,
    Resolved,
    build,
    go_on_from,
    resolve,
    training_batches,
    validation_batches,
)
from precision_lab.check import check
from precision_lab.checkpoint import Checkpoints, NotPlain, written_in
from precision_lab.code import code_of
from precision_lab.config import Config, as_values
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.findings import Findings
from precision_lab.fitting import OutOfMemory, hold_to_budget
from precision_lab.inspection import measure_afterwards
from precision_lab.loading import WorkerDied
from precision_lab.logs import log, logging_to
from precision_lab.meter import Meter
from precision_lab.probe.watch import Watch
from precision_lab.recorder import CannotWrite, Recorder, metrics_of, remove_half_written
from precision_lab.redaction import redact, secrets_in
from precision_lab.resume import about, go_on
from precision_lab.seeds import derive, generator_states, restore_generators, seed_globals
from precision_lab.stops import Stops, Terminated
from precision_lab.terminal import BUSY, bar, summary_lines, what_went_wrong
from precision_lab.tracking.of_folder import FolderMirror
from precision_lab.tracking.words import mirror_of_run
from precision_lab.trainer import BETWEEN_STEPS, EVALUATION, Progress, Trainer, evaluate, is_eval_point


def run(asked: Config, sweep: bool = False, asked_at: float = math.inf) -> int:
    """Do what was asked and return the exit code: 0 done, 1 failed, 2 wrong input, 130 or 143 interrupted.

    A single run gets a folder of its own, once its input is known to be right: an InputError means that nothing was
    written. A job of a `sweep` has the folder its content names; it is left alone if it is finished, by `rerun` or
    since `asked_at` (seconds since 1970), or being run by another process. What was stopped or killed goes on.
    """
    if sweep:
        _refuse_a_second_job()
        folders.require_no_name(asked)
    if asked.check:
        return check(asked)
    resolved = resolve(asked)
    asked, device = resolved.asked, resolved.device
    parts = None if sweep else build(resolved)
    environment = environment_of(device) | {"code": code_of(asked), "support": resolved.support}
    secrets = secrets_in(os.environ, as_values(asked), sys.argv)
    with Stops() as stops:
        if not sweep:
            claim = folders.claim_single(asked, device.type)
        else:
            folder = folders.job_folder(asked, device.type)
            try:
                claim = folders.claim(folder, asked.rerun, environment["fingerprint"], asked_at)
            except folders.Busy as owner:
                print(f"{identity.title(asked)}{BUSY}{owner} -> {folder}")
                return 0
            if not claim.log:
                print(f"{identity.title(asked)}: {claim.status} before -> {folder}")
                return 1 if claim.status == "failed" else 0
        with claim.log, logging_to(claim.log, secrets):
            one = _Run(resolved, parts, claim, environment, secrets, stops)
            del parts  # `one` may let go of them
            if claim.named:  # refused before anything of it is touched
                one.refuse_what_cannot_go_on()
            return one.to_the_end()


_a_job_ran = False


def _refuse_a_second_job() -> None:
    global _a_job_ran
    if _a_job_ran:
        raise InputError(
            "This launcher runs several jobs in one process, where backend flags and memory peaks leak from one to "
            "the next; use hydra/launcher=isolated."
        )
    _a_job_ran = True


class _Run:
    """Training, evaluation and measuring, and the status whatever happens on the way."""

    def __init__(
        self,
        resolved: Resolved,
        parts: Parts | None,
        claim: folders.Claim,
        environment: dict[str, Any],
        secrets: list[str],
        stops: Stops,
    ):
        self.resolved, self.parts, self.asked = resolved, parts, resolved.asked
        self.claim, self.environment, self.secrets, self.stops = claim, environment, secrets, stops
        self.recorder = Recorder(claim.folder, secrets)
        self.checkpoints: Checkpoints | None = None
        self.kept_at: int | None = None  # steps done at the last checkpoint of this process
        self.ready: Assembly | None = None
        self.trainer: Trainer | None = None
        self.training = self.taken_over = False
        self.found = Findings()
        self.hashes: dict[str, str] = {}
        self.memory: dict[str, Any] | None = None
        self.unreadable: Callable[[], list[str]] = list  # files of the data, up to now
        self.lost: OutOfMemory | None = None
        self.mirror: FolderMirror | None = None

    def to_the_end(self) -> int:
        """Run and return the exit code; every way out leaves status.json and result.json."""
        code = 0
        try:
            self._take_over()
            self.stops.release()
            self._begin()
            self._train_and_measure()
            self.stops.hold()
            status, reason = ("diverged", self.progress.diverged) if self.progress.diverged else ("completed", None)
        except Terminated as stop:
            self.stops.hold()
            status, reason = "interrupted", str(stop)
            code = 130 if reason == "Ctrl-C" else 143
            if not stop.in_a_step:
                self._keep_where_it_stopped()
        except CannotWrite as error:  # as if it had been killed: the same command goes on from the last checkpoint
            self.stops.hold()
            status, reason, code = "interrupted", str(error), 1
        except (Exception, SystemExit) as error:  # sys.exit() in a model is no end of ours
            self.stops.hold()
            first_line = str(error).split("\n")[0]
            if hardware.is_out_of_memory(error):
                status, reason = "out_of_memory", first_line
                self.lost = OutOfMemory.told_by(error, self.trainer if self.training else None, self.resolved)
            elif isinstance(error, InputError | WorkerDied):
                status, reason, code = "failed", first_line, 2 if isinstance(error, InputError) else 1
            else:
                status, reason, code = "failed", f"{type(error).__name__}: {first_line}", 1
            log.exception("the run stopped")
        if not self.taken_over:  # what was stopped can still go on, once what is wrong is mended
            log.error("not gone on with: %s", reason)
            if self.mirror:
                self.mirror.abandon(status, redact(reason, self.secrets))
            return code or 1
        if self.lost and self.training:  # out here nothing holds the failed step's tensors
            self.lost = self.lost.with_what_fits(self.trainer, self.ready)
            reason = self.lost.sentence(self.asked.trainer.accumulation)
        try:
            self._finish(status, reason)
        except CannotWrite as error:
            log.error(error)
            return 1
        return code

    def _take_over(self) -> None:
        """Make the folder this attempt's own: what an earlier one left stays if it is gone on with."""
        remove_half_written(self.claim.folder)
        self.goes_on = self.claim.goes_on(self.asked)
        if not self.goes_on:
            folders.set_aside(self.claim.folder)
            self._describe()

    def _begin(self) -> None:
        for note in self.resolved.notes:
            log.info(note)
        log.info("%s -> %s", identity.title(self.asked), self.recorder.folder)
        self.mirror = mirror_of_run(self.asked, self.environment, self.secrets, self.claim.folder)
        self._take(self.parts or build(self.resolved))
        self.parts = None
        for note in self.ready.notes:
            log.info(note)
        if self.trainer.guard.syncs:
            optimizer = type(self.trainer.optimizer).__name__
            log.info("%s takes no flag to skip a step by: each step waits for the device", optimizer)
        self.environment |= {"backend_flags": self.ready.flags, "label_proof": self.ready.proof}
        self.recorder.metrics |= metrics_of(self.ready.workload.task)
        self.hashes |= self.ready.hashes
        plan = self.asked.trainer
        self.checkpoints = Checkpoints(self.claim.folder, plan.checkpoint_every, plan.checkpoint_minutes)
        if self.goes_on:
            self._go_on()
        self._describe(total_steps=self.ready.total_steps)

    def _take(self, parts: Parts) -> None:
        """Train with these, from the first step on."""
        self.ready, self.trainer, self.batches = parts
        self.unreadable = self.ready.workload.data.unreadable
        untimed = hold_to_budget(self.trainer, self.ready)
        self.meter = Meter(self.trainer.policy.device, self.asked.meter.warmup_steps, untimed_steps=untimed)
        seed_globals(derive(self.asked.seed, "dropout"))

    def _describe(self, **known: int) -> None:
        """Say in the folder what runs here; from now on it is this attempt's."""
        self.taken_over = True
        self.recorder.status("running", **known)
        self.recorder.config(as_values(self.asked))
        self.recorder.environment(self.environment)

    def _go_on(self) -> None:
        """Take up the state of the last checkpoint; where there is none that can be used, start over."""
        by_itself = self.asked.trainer.resume == "auto"
        try:
            state, changes, problems = go_on(*self._to_go_on_from(), self._load, self._begin_anew, by_itself)
        except InputError as error:
            if not by_itself:
                raise
            log.info("starting over (what was there is kept under attempts/): %s", error)
            folders.set_aside(self.claim.folder)
            return
        for problem in problems:
            log.warning("passed over: %s", problem)
        for change in changes:
            log.warning("goes on all the same: %s", change)
        self.checkpoints.begin_after(self.trainer.done)
        self.recorder.resume(state["position"])
        if self.mirror:
            for line in self.recorder.logged():
                self.mirror.log(line)
        restore_generators(state["generators"], self.trainer.policy.device.type)  # W&B may have drawn
        log.info("goes on after step %d, from its checkpoint", self.trainer.done)

    def refuse_what_cannot_go_on(self) -> None:
        """InputError where what the user named cannot be used, as far as can be told without loading it."""
        go_on(*self._to_go_on_from(), lambda state: None, lambda: None)

    def _to_go_on_from(self) -> tuple[Path, dict[str, Any], list[Path]]:
        named, folder = self.claim.checkpoint, self.claim.folder
        return folder, self._about(), [named] if named else written_in(folder)

    def _about(self) -> dict[str, Any]:
        return about(self.asked, self.environment, self.secrets, (self.ready or self.parts[0]).hashes)

    def _load(self, state: dict[str, Any]) -> None:
        """Take up a state; no file is touched."""
        self.batches = go_on_from(self.trainer, self.ready, state)
        self.meter.load_state(state["meter"])
        found = Findings.of_state(state["findings"])
        found.resumed_at = [*found.resumed_at, self.trainer.done]
        self.recorder.learn([*found.final, *found.best])
        self.found = found

    def _begin_anew(self) -> None:
        """Let go what a state was loaded into half way, and its memory with it."""
        self.ready = self.trainer = self.batches = self.meter = None
        self.unreadable = list
        hardware.release_memory()
        self._take(build(self.resolved))

    def _state(self) -> dict[str, Any]:
        self.found.add_unreadable(self.unreadable())
        return {
            "about": self._about(),
            "trainer": self.trainer.state(),
            "batches": self.batches.state(),
            "meter": self.meter.state(),
            "generators": generator_states(self.trainer.policy.device.type),
            "findings": self.found.state(),
            "position": self.recorder.position(),
        }

    def _write_checkpoint(self) -> None:
        if not self.checkpoints:
            return
        try:
            self.checkpoints.write(self.trainer.done, self._state(), self.progress.troubles())
            self.kept_at = self.trainer.done
        except NotPlain as error:
            log.warning("no checkpoint can be written: %s, and a file that holds such could run any code", error)
            self.checkpoints = None

    def _keep_where_it_stopped(self) -> None:
        """A checkpoint on being told to stop, between two steps."""
        if self.training and self.trainer.done not in (0, self.kept_at):
            try:
                self._write_checkpoint()
            except CannotWrite as error:
                log.error(error)

    @property
    def progress(self) -> Progress:
        return self.trainer.progress if self.trainer else Progress()

    def _train_and_measure(self) -> None:
        asked, plan = self.asked, self.asked.trainer
        trainer, meter = self.trainer, self.meter

        def validation() -> Iterator[tuple[Any, int]]:
            for batch in validation_batches(self.ready):
                self.stops.check()  # here and nowhere else in an evaluation, which leaves the state as it was
                yield batch

        steps = self.ready.total_steps
        watch = Watch(asked.probe.ranges, trainer, self.ready.place, self.recorder)
        with bar(identity.title(asked), steps) as show:

            def on_log(progress: Progress, readings: dict[str, float]) -> None:
                readings = readings | watch.readings(progress.step)
                try:
                    if progress.diverged or is_eval_point(progress.step, plan, steps):
                        trainer.phase = EVALUATION
                        readings = readings | evaluate(trainer.policy, trainer.task, trainer.model, validation)
                        trainer.phase = BETWEEN_STEPS
                except Exception:  # what the window measured stands, where the evaluation fails
                    self._log(readings)
                    raise
                if "val/loss_fp32" in readings:
                    self.found.curve.add(progress.step, meter.train_s, readings["val/loss_fp32"])
                self._log(readings)
                show(progress.step, readings)

            def keeps(done: int) -> bool:
                due = self.checkpoints and self.checkpoints.due(done, steps)
                return bool(due) or self.stops.arrived or self.stops.checkpoint_asked

            def wanted(done: int) -> bool:
                return keeps(done) or watch.wanted(done)

            def pause() -> None:
                watch.look(trainer.done)
                if keeps(trainer.done) and not (self.stops.arrived or self.progress.diverged):
                    self.stops.checkpoint_asked = False
                    self._write_checkpoint()
                self.stops.check()

            self.training = True
            try:
                with self.stops.waiting_for_the_step():
                    batches = watch.begin(self.batches, lambda: training_batches(self.ready))
                    trainer.train(batches, meter, steps, on_log, wanted, pause)
                    self.stops.hold()  # the run is complete: what is left is to measure, and that trains
            finally:  # an interrupted run keeps what it measured
                self.found.final |= meter.summary() | {"train/spike_score": self.progress.spikes.score}
                self.hashes |= {"batches": self.batches.order_hash(), "losses": self.progress.losses.digest()}
            self.training = False
        for sentence in watch.predictions():
            log.info(sentence)
        self.progress.end(self.found.final["val/loss_fp32"])
        if not self.progress.diverged:
            folder, final = self.claim.folder, self.found.final
            self.memory = measure_afterwards(trainer, self.ready, self.resolved, folder, final)

    def _log(self, readings: dict[str, float]) -> None:
        line = self.recorder.log(self.progress.step, readings)
        if self.mirror:
            self.mirror.log(line)
        self.found.final |= readings
        self.found.best = self.recorder.best(self.found.best, readings)

    def _finish(self, status: str, reason: str | None) -> None:
        asked, progress, found = self.asked, self.progress, self.found
        found.add_unreadable(self.unreadable())
        if bad := found.unreadable_files():
            first = ", ".join(bad["first"]) + ", ..." * (bad["count"] > len(bad["first"]))
            log.warning("files that cannot be read, left out or replaced: %d (%s)", bad["count"], first)
        done = self.trainer.done if self.trainer else 0
        reason = redact(reason, self.secrets)  # an exception's words, which go to W&B too
        self.recorder.result(
            found.final,
            found.best,
            status=status,
            reason=reason,
            step=done,
            applied_steps=progress.step - progress.skipped_steps,
            arm=identity.arm_label(asked.precision),
            seed=asked.seed,
            experiment_signature=identity.experiment_signature(asked),
            run_signature=identity.run_signature(asked),
            hashes=self.hashes,
            **{key: self.environment[key] for key in ("fingerprint", "support", "host", "versions", "git", "code")},
            finished=time.time(),
            resumed_at=found.resumed_at,
            nonfinite=progress.nonfinite(),
            overrides=[word for word in sys.argv[1:] if word.startswith("~") or ("=" in word and word[0] != "-")],
            unreadable_files=found.unreadable_files(),
            memory=self.memory,
            out_of_memory=asdict(self.lost) if self.lost else None,
            curve=found.curve.stored(),
            config=as_values(asked),
        )
        self.recorder.status(status, reason=reason, step=done)
        shown = f"{reason.rstrip('.')}; see {self.recorder.folder / 'train.log'}" if status == "failed" else reason
        log.info(summary_lines(identity.arm_label(asked.precision), status, shown, done, found.final))
        if wrong := what_went_wrong(progress.nonfinite(), status == "diverged", self.recorder.folder):
            log.info(wrong)
        if self.mirror:
            self.mirror.finish(status, reason)
            self.recorder.status(status, reason=reason, step=done, wandb=self.mirror.state)
