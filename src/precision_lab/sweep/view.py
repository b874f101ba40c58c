"""What a sweep shows: a live table on a terminal, plain lines elsewhere, and the table at the end. No torch."""

import json
import os
import statistics
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from precision_lab import folders
from precision_lab.recorder import redact, secrets_in
from precision_lab.sweep.plan import Job

REFRESH_S = 1.0
COLOURS = {"completed": "green", "running": "cyan", "failed": "red", "diverged": "yellow", "out_of_memory": "yellow"}
TAIL_BYTES = 4096


class View:
    """Shows the jobs as they are. `secrets` are kept off the terminal."""

    def __init__(self, jobs: list[Job], secrets: list[str], places: int = 1, console: Console | None = None):
        self.jobs, self.secrets, self.places = jobs, secrets + secrets_in(os.environ), places
        self.console = console or Console(highlight=False, soft_wrap=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self._shown = 0.0

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        """Print a line, above the table where there is one."""
        self.console.print(Text(redact(line, self.secrets)), soft_wrap=True)

    def update(self) -> None:
        """Draw the live table anew, at most once a second."""
        if self.live and time.monotonic() - self._shown >= REFRESH_S:
            self._shown = time.monotonic()
            self.live.update(self.table(self._window()), refresh=True)

    def ended(self, job: Job) -> None:
        """A line for a job that has ended: a failed one's always, the others' where no table tells."""
        if job.status in ("failed", "interrupted") or not self.live:
            done = sum(one.status not in ("waiting", "running") for one in self.jobs)
            self.say(f"[{done}/{len(self.jobs)}] {job.title}: {sentence(job)}")
        self._shown = 0.0

    def summary(self) -> None:
        """The table of all jobs, and a line for each that has no result."""
        self.console.print(self.table(self.jobs))
        for job in self.jobs:
            if job.reason:
                self.say(f"{job.title}: {sentence(job)}")
        before = sum(job.before for job in self.jobs)
        if before:
            self.say(f"{before} of {len(self.jobs)} jobs had been run before and were left as they are.")

    def table(self, jobs: list[Job]) -> Table:
        """A row a job; its caption counts all jobs and says how long the rest will take."""
        table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
        table.caption = self._caption()
        table.add_column("job", overflow="fold")
        table.add_column("status", no_wrap=True)
        for name in ("step", "ms/step", "train loss", "val loss", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for job in jobs:
            table.add_row(redact(job.title, self.secrets), Text(_word(job), COLOURS.get(job.status, "")), *_cells(job))
        return table

    def _window(self) -> list[Job]:
        room = max(3, self.console.height - 6)
        if len(self.jobs) <= room:
            return self.jobs
        now = next((n for n, job in enumerate(self.jobs) if job.status in ("running", "waiting")), len(self.jobs))
        start = min(max(0, now - room // 2), len(self.jobs) - room)
        return self.jobs[start : start + room]

    def _caption(self) -> str:
        counts: dict[str, int] = {}
        for job in self.jobs:
            counts[job.status] = counts.get(job.status, 0) + 1
        text = ", ".join(f"{number} {status}" for status, number in counts.items())
        left = self._seconds_left()
        return text + (f"; about {clock(left)} left" if left else "")

    def _seconds_left(self) -> float | None:
        took = [job.seconds for job in self.jobs if job.seconds and job.status not in ("running", "waiting")]
        if not took:
            return None
        one = statistics.median(took)
        running = sum(max(0.0, one - (job.seconds or 0.0)) for job in self.jobs if job.status == "running")
        waiting = sum(job.status == "waiting" for job in self.jobs) * one
        return (running + waiting) / self.places or None


def sentence(job: Job) -> str:
    """How a job stands, in words."""
    if job.status in ("failed", "interrupted", "diverged", "out_of_memory"):
        where = f"; see {job.folder / folders.LOG}" if job.status == "failed" else ""
        return f"{job.status}{f' ({job.reason}{where})' if job.reason else ''}"
    if job.reason:
        return f"{job.status}: {job.reason}"
    step, step_ms, _, loss, took = _cells(job)
    figures = [f"step {step}", f"{step_ms} ms a step", f"val loss {loss}", took]
    return f"{_word(job)}, " + ", ".join(text for text in figures if "-" not in text.split()[-1:] and text != "-")


def _word(job: Job) -> str:
    return f"{job.status}, before" if job.before else job.status


def _cells(job: Job) -> tuple[str, str, str, str, str]:
    """Step, ms a step, training loss, validation loss in float32, and the time taken (running: the time left)."""
    if job.status in ("waiting", "unsupported", "same", "not run", "checked", "elsewhere"):
        return "-", "-", "-", "-", "-"
    figures = _progress(job) if job.status == "running" else _result(job)
    step, total = figures.get("step"), figures.get("total_steps")
    shown = "-" if step is None else f"{step}/{total}" if total else str(step)
    time_s = job.seconds
    if job.status == "running":
        time_s = _left(figures)
    numbers = [figures.get(key) for key in ("step_ms", "train_loss", "val_loss")]
    texts = ["-" if number is None else f"{number:.4g}" for number in numbers]
    took = "-" if time_s is None else f"{clock(time_s)} left" if job.status == "running" else clock(time_s)
    return shown, *texts, took


def _result(job: Job) -> dict[str, Any]:
    result = folders.read_json(job.folder / "result.json")
    summary = result.get("summary") or {}
    return {
        "step": result.get("step"),
        "step_ms": summary.get("final/perf_step_ms_p50"),
        "train_loss": summary.get("final/train_loss"),
        "val_loss": summary.get("final/val_loss_fp32"),
    }


def _progress(job: Job) -> dict[str, Any]:
    """The last line of metrics.jsonl, read from its end: a long run's is large."""
    try:
        with (job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            line = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):  # none yet, or half of one
        line = {}
    told = folders.read_json(job.folder / "status.json")
    return {
        "step": line.get("train/step"),
        "total_steps": told.get("total_steps"),
        "seconds": line.get("time_s"),
        "step_ms": line.get("perf/step_ms_p50"),
        "train_loss": line.get("train/loss"),
        "val_loss": line.get("val/loss_fp32"),
    }


def _left(figures: dict[str, Any]) -> float | None:
    step, total, seconds = (figures.get(key) for key in ("step", "total_steps", "seconds"))
    return seconds / step * (total - step) if step and total and seconds else None


def clock(seconds: float) -> str:
    """`8 s`, `4 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
