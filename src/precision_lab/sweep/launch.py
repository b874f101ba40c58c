"""The jobs of a sweep as processes: started in turn, watched to their end, stopped on a signal. No torch."""

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from precision_lab import folders
from precision_lab.config import ROOT, OnError, Rerun
from precision_lab.errors import InputError
from precision_lab.stops import STOP_SIGNALS, handled_by
from precision_lab.sweep.child import Order
from precision_lab.sweep.plan import Job
from precision_lab.sweep.view import View
from precision_lab.terminal import BUSY, CHECK_FILE, CHECKED

CHILD = [sys.executable, "-P", "-c", "from precision_lab.sweep.child import main; main()"]
POLL_S = 0.1
LOOK_S = 1.0  # between two looks at the jobs that are run elsewhere
PROBE_BYTES = 4096  # of one block, that a disk with room takes
PATIENCE_S = 60  # that a job gets to end after a signal, before it is killed


def places_for(gpus: tuple[int, ...]) -> list[dict[str, str]]:
    """The environments that jobs run in at the same time: one for each GPU of several, else one."""
    if len(gpus) < 2:
        return [{}]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [{"CUDA_VISIBLE_DEVICES": visible[number] if visible else str(number)} for number in gpus]


def run_jobs(jobs: list[Job], places: list[dict[str, str]], view: View, child: list[str] = CHILD) -> int:
    """Run the jobs that wait, in their order, one at a time in each place; return the sweep's exit code.

    A job that another process is running is waited for, and run if that one leaves it without an end.
    0: every job has a result or was skipped as asked; 1: one failed or is left; 130 or 143: interrupted.
    """
    arrived: list[int] = []  # noted, the first one first; they interrupt nothing here
    sweep = _Sweep(jobs, places, view, child)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: sweep.ask_for_checkpoints())
    try:
        with handled_by(lambda number, frame: arrived.append(number)):
            sweep.to_the_end(arrived)
    finally:
        signal.signal(signal.SIGUSR1, before)
    if arrived:
        return 130 if arrived[0] == signal.SIGINT else 143
    fine = (*folders.RESULTS, "unsupported", "same", "checked")
    return 0 if all(job.status in fine for job in jobs) else 1


class _Sweep:
    def __init__(self, jobs: list[Job], places: list[dict[str, str]], view: View, child: list[str]):
        self.waiting = deque(job for job in jobs if job.status == "waiting")
        self.free, self.view, self.child = list(places), view, child
        self.running: list[_Running] = []
        self.elsewhere: list[_Running] = []  # ended: they found their folders held by other processes
        self.look_at, self.waits, self.left = 0.0, False, ""

    def to_the_end(self, arrived: list[int]) -> None:
        told = False
        while self.waiting or self.running or self.elsewhere:
            if arrived and not told:
                told = True
                self.leave("interrupted before it began")
                for one in self.running:
                    one.stop(arrived[0])
            while self.waiting and self.free:
                self.start(self.waiting.popleft(), self.free.pop(0))
            self.view.update()
            time.sleep(POLL_S)
            for one in [one for one in self.running if one.ended()]:
                self.ended(one)
            if self.elsewhere and time.monotonic() >= self.look_at:
                self.look_elsewhere()

    def ask_for_checkpoints(self) -> None:
        """A signal's handler: SIGUSR1 stops no job."""
        for one in list(self.running):
            one.ask_for_a_checkpoint()

    def start(self, job: Job, place: dict[str, str]) -> None:
        try:
            self.running.append(_Running(job, place, self.child))
        except OSError as error:  # the folder, or no process
            job.status, job.reason = "failed", f"could not be started ({error.strerror}: {error.filename})"
            self.free.append(place)
            self.settle(job)

    def ended(self, one: "_Running") -> None:
        self.running.remove(one)
        self.free.append(one.place)
        if one.job.status != "elsewhere":
            self.settle(one.job)
            return
        self.elsewhere.append(one)
        if self.left:
            self.leave(self.left)

    def look_elsewhere(self) -> None:
        """Take a job that nobody runs any more: as it stands if it came to its end, else it waits to be run."""
        one = next((one for one in self.elsewhere if not folders.held(one.job.folder)), None)
        if one:
            self.elsewhere.remove(one)
            if one.ended_elsewhere():
                self.settle(one.job)
            else:
                one.job.status, one.job.reason = "waiting", ""
                self.waiting.append(one.job)
            return
        self.look_at = time.monotonic() + LOOK_S
        if not (self.waiting or self.running or self.waits):
            self.waits = True
            self.view.waits_for([one.job for one in self.elsewhere])

    def settle(self, job: Job) -> None:
        self.view.ended(job)
        if job.status == "failed" and job.asked.on_error is OnError.stop:
            self.leave("an earlier job failed, and on_error=stop")

    def leave(self, reason: str) -> None:
        self.left = reason
        for job in self.waiting:
            job.status, job.reason = "not run", reason
        for one in self.elsewhere:
            one.job.status, one.job.reason = "not run", f"left to {one.job.reason}"
        self.waiting.clear()
        self.elsewhere.clear()


class _Running:
    """A job's process."""

    def __init__(self, job: Job, place: dict[str, str], child: list[str]):
        self.job, self.place = job, place
        self.began, self._kill_at, self._stopped = time.time(), float("inf"), False
        self._log = job.folder / folders.LOG
        job.folder.mkdir(parents=True, exist_ok=True)
        folders.open_log(job.folder).close()  # OSError where it is a pipe or a folder
        self._found = folders.read_status(job.folder)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                child, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **place}
            )
        job.status, job.pid, job.seconds = "running", self.process.pid, 0.0
        order = Order(job.asked, sys.path, [str(ROOT / "train.py"), *job.overrides], job.folder, job.asked_at)
        # in a thread: a pipe takes 64 KiB at once, and its open end tells the job that the sweep lives
        threading.Thread(target=self._hand_over, args=(pickle.dumps(order),), daemon=True).start()

    def _hand_over(self, order: bytes) -> None:
        with suppress(OSError, ValueError):  # the job ended before it read, and the pipe may be closed
            self.process.stdin.write(order)
            self.process.stdin.flush()

    def stop(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        self._stopped, self._kill_at = True, time.time() + PATIENCE_S

    def ask_for_a_checkpoint(self) -> None:
        """Hand SIGUSR1 on to a job that has begun: one that is still loading has nothing to save, and no handler."""
        told = folders.read_status(self.job.folder)
        if told.get("pid") == self.process.pid and told.get("status") == "running":
            self.process.send_signal(signal.SIGUSR1)

    def ended(self) -> bool:
        """Whether the process has ended; then the job has its status."""
        self.job.seconds = time.time() - self.began
        if time.time() > self._kill_at:
            self.process.kill()
        code = self.process.poll()
        if code is None:
            return False
        with suppress(OSError):
            self.process.stdin.close()
        self._judge(code)
        return True

    def ended_elsewhere(self) -> bool:
        """Whether the process that held the folder brought the job to its end; then it stands as that one left it.

        So with any `rerun`, which is about ends that were there before.
        """
        job, told = self.job, folders.read_status(self.job.folder)
        try:
            status = folders.finished(job.folder, Rerun.never, job.fingerprint)
        except InputError:  # on other hardware: the job's next process says so, or runs it
            return False
        if status is None or told == self._found:
            return False
        job.status, job.reason, job.before = status, told.get("reason") or "", True
        return True

    def _judge(self, code: int) -> None:
        job, told = self.job, folders.read_status(self.job.folder)
        status, reason = told.get("status"), told.get("reason") or ""
        own = told.get("pid") == self.process.pid and told.get("updated", 0) >= self.began
        since = told.get("updated", 0) > job.asked_at  # by another sweep, whose failures are not asked for again
        left_alone = code == 0 or (code == 1 and status == "failed" and (since or job.asked.rerun is Rerun.never))
        busy = self._busy() if code == 0 else ""
        held = code == 0 and status == "running" and folders.held(job.folder)  # it may be said in a log that is full
        if own and code == 1 and status == "interrupted":  # a file could not be written
            job.status, job.reason = "failed", reason
        elif own and status != "running":
            job.status, job.reason = status, reason
        elif code == 0 and job.asked.check and any(line.endswith(CHECKED) for line in self._said()):
            job.reason = folders.read_json(job.folder / CHECK_FILE).get("out_of_memory") or ""
            job.status = "out_of_memory" if job.reason else "checked"
        elif not own and (held or busy and status not in folders.FINISHED[job.asked.rerun]):
            job.status, job.reason, job.seconds = "elsewhere", busy or folders.owner(job.folder), None
        elif status in folders.FINISHED[Rerun.never] and not own and left_alone:  # two sweeps share their jobs
            job.status, job.reason, job.before = status, reason, True
        elif self._stopped or code in (130, 143, *(-number for number in STOP_SIGNALS)):
            job.status = "interrupted"
        else:
            job.status, job.reason = "failed", _unwritable(job.folder) or self._why(code, own)

    def _busy(self) -> str:
        """Who runs the job, in the words of a process that found its folder held; empty if it did not."""
        return next((line.partition(BUSY)[2].partition(" ->")[0] for line in self._said() if BUSY in line), "")

    def _why(self, code: int, own: bool) -> str:
        """What is known of a job that ended without a word in its folder."""
        if code < 0:
            return _killed_by(-code)
        if code == 0 or own:
            return f"ended with exit code {code} and without a result"
        last = [f"exit code {code}", *self._said()][-1]
        return re.sub(r"^(precision-lab: |[\d-]{10} [\d:,]{12} [A-Z]+ )", "", last)  # the log's own beginning of a line

    def _said(self) -> list[str]:
        """The lines of this process in the log: what stands before is an earlier attempt's."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode(errors="replace").strip().splitlines()
        except OSError:  # the folder is gone
            return []


def _unwritable(folder: Path) -> str:
    """Why a job could write nothing more; empty where that is not so."""
    if not folder.is_dir():
        return "its folder is gone"
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if file.write(bytes(PROBE_BYTES)) == PROBE_BYTES:
                return ""
        return f"its folder cannot be written ({os.strerror(errno.ENOSPC)})"
    except OSError as error:
        return f"its folder cannot be written ({error.strerror})"


def _killed_by(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    memory = ", perhaps for want of memory" if number == signal.SIGKILL else ""
    return f"killed by {known.get(number, f'signal {number}')}{memory}"
