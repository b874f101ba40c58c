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
from precision_lab.recorder import number_in
from precision_lab.redaction import redact, secrets_in
from precision_lab.sizes import size
from precision_lab.sweep.plan import Job
from precision_lab.terminal import CHECK_FILE

REFRESH_S = 1.0
TAIL_BYTES = 4096
COLOURS = {"completed": "green", "running": "cyan", "failed": "red", "diverged": "yellow", "out_of_memory": "yellow"}
COLUMNS = {"step": "step", "step_ms": "ms/step", "train_loss": "train loss", "val_loss": "val loss", "time": "time"}
CHECKED_COLUMNS = {"step_ms": "ms/step", "peak": "peak", "phase": "phase", "time": "time"}
WIDTHS = {"train_loss": 80, "step_ms": 68, "val_loss": 58, "time": 46}  # of a terminal that has room for them


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Say no more: a reader that has gone is no reason to end a sweep."""
        self.quiet = True


class View:
    """Shows the jobs as they are. `secrets` are kept off the terminal; `places` is how many jobs run at a time."""

    def __init__(self, jobs: list[Job], secrets: list[str], places: int = 1, console: Console | None = None):
        self.jobs, self.places = jobs, places
        self._secrets = secrets + secrets_in(os.environ)
        self._console = console or _Console(highlight=False)
        terminal = self._console.is_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None
        self._shown = 0.0
        self._told: list[Job] = []  # whose reason needs no second telling

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line, above the table where there is one."""
        self._console.print(self._clean(line), soft_wrap=True)

    def begin(self, notes: list[str]) -> None:
        """What is known before the first job: about the machine, and which jobs will not run for what reason."""
        for note in notes:
            self.say(note)
        idle = [job for job in self.jobs if job.status in ("unsupported", "same")]
        for reason in dict.fromkeys(job.reason for job in idle):
            titles = [job.title for job in idle if job.reason == reason]
            self.say(f"skipped: {', '.join(titles)} ({reason})")
        self._told += idle

    def update(self) -> None:
        """Draw the live table anew, at most once a second."""
        if self._live and time.monotonic() - self._shown >= REFRESH_S:
            self._shown = time.monotonic()
            self._live.update(self._that_fits(), refresh=True)

    def ended(self, job: Job) -> None:
        """A line for a job that has ended: a failed one's always, the others' where no table tells."""
        if job.status in ("failed", "interrupted") or not self._live:
            done = sum(one.status not in ("waiting", "running", "elsewhere") for one in self.jobs)
            self.say(f"[{done}/{len(self.jobs)}] {job.title}: {sentence(job)}")
            self._told.append(job)
        self._shown = 0.0

    def waits_for(self, jobs: list[Job]) -> None:
        """A line for jobs that are run elsewhere, when there is nothing else to do and no table tells."""
        if not self._live:
            what = "1 job that is" if len(jobs) == 1 else f"{len(jobs)} jobs that are"
            self.say(f"waiting for {what} run elsewhere ({'; '.join(dict.fromkeys(job.reason for job in jobs))})")

    def summary(self) -> None:
        """The table of all jobs, why one has no result, and what is left."""
        self._console.print()
        self._console.print(self._table(self.jobs))
        untold: dict[str, list[str]] = {}
        for job in self.jobs:
            if job.reason and not any(job is told for told in self._told):
                untold.setdefault(sentence(job), []).append(job.title)
        for words, titles in untold.items():
            self.say(f"{', '.join(titles)}: {words}")
        before = sum(job.before for job in self.jobs)
        if before:
            self.say(f"{before} of {len(self.jobs)} jobs had been run before and were left as they are.")
        failed = [job for job in self.jobs if job.status == "failed" and not job.asked.check]
        told = [job for job in failed if folders.read_status(job.folder).get("status") == "failed"]
        # one that was killed could not tell that it failed: its folder says it is missing
        left = sum(job.status in ("not run", "interrupted") for job in self.jobs) + len(failed) - len(told)
        if left:
            self.say(f"{left} of {len(self.jobs)} jobs are left; the same command runs them.")
        if told:
            self.say("The same command with rerun=failed runs the failed ones again.")

    def _clean(self, text: str) -> Text:
        return Text(redact(text, self._secrets))

    def _table(self, jobs: list[Job]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left", caption=self._caption())
        table.add_column("job", overflow="fold", min_width=8)
        table.add_column("status", no_wrap=True)
        headers = CHECKED_COLUMNS if any(job.asked.check for job in jobs) else COLUMNS
        columns = [key for key in headers if self._console.width >= WIDTHS.get(key, 0)]
        for key in columns:
            table.add_column(headers[key], justify="right", no_wrap=True)
        for job in jobs:
            known = figures(job)
            cells = [known.get(key, "-") for key in columns]
            table.add_row(self._clean(job.title), Text(job.status, COLOURS.get(job.status, "")), *cells)
        return table

    def _that_fits(self) -> Table:
        """The jobs around the one that runs, as many as the terminal has rows for: a title may take several."""
        at_work = [n for n, job in enumerate(self.jobs) if job.status in ("running", "waiting")]
        at_work += [n for n, job in enumerate(self.jobs) if job.status == "elsewhere"]
        now = at_work[0] if at_work else len(self.jobs)
        room = max(1, min(len(self.jobs), self._console.height - 3))
        while True:
            start = max(0, min(now - room // 2, len(self.jobs) - room))
            table = self._table(self.jobs[start : start + room])
            rows = len(self._console.render_lines(table, pad=False))
            if rows < self._console.height or room == 1:
                return table
            room = max(1, min(room - 1, room * self._console.height // rows))

    def _caption(self) -> str:
        counts: dict[str, int] = {}
        for job in self.jobs:
            counts[job.status] = counts.get(job.status, 0) + 1
        left = self._seconds_left()
        return ", ".join(f"{n} {status}" for status, n in counts.items()) + (
            f"; about {clock(left)} left" if left else ""
        )

    def _seconds_left(self) -> float | None:
        took = [job.seconds for job in self.jobs if job.seconds and job.status not in ("running", "waiting")]
        if not took:
            return None
        one = statistics.median(took)
        running = sum(max(0.0, one - (job.seconds or 0.0)) for job in self.jobs if job.status == "running")
        return (running + one * sum(job.status == "waiting" for job in self.jobs)) / self.places


def sentence(job: Job) -> str:
    """How a job stands, in words: `completed: step 60, 1.42 ms a step, val loss 0.1143, 6 s`."""
    there = job.status == "failed" and not job.asked.check and job.folder.is_dir()
    see = f"; see {job.folder / folders.LOG}" if there else ""
    if job.reason:
        return f"{_word(job)} ({job.reason.rstrip('.') if see else job.reason}{see})"
    known = figures(job)
    words = {"step": "step {}", "step_ms": "{} ms a step", "peak": "peak {}", "val_loss": "val loss {}", "time": "{}"}
    told = [template.format(known[key]) for key, template in words.items() if known.get(key, "before") != "before"]
    return ": ".join([_word(job), ", ".join(told)] if told else [_word(job)])


def _word(job: Job) -> str:
    return f"{job.status}, before" if job.before else job.status


def figures(job: Job) -> dict[str, str]:
    """What is known of a job, by the keys of its columns; `val_loss` in float32, `time` taken, or about left (~)."""
    if job.asked.check:
        return _outlook(job)
    if job.status in ("waiting", "unsupported", "same", "not run", "checked", "elsewhere"):
        return {}
    running = job.status == "running"
    values = _progress(job) if running else _result(job)
    step, total, seconds = (values.pop(key, None) for key in ("step", "total_steps", "elapsed_s"))
    known = {key: f"{value:.4g}" for key, value in values.items() if value is not None}
    if step is not None:
        known["step"] = f"{step:.0f}/{total}" if running and total else f"{step:.0f}"
    if running and step and total and seconds:
        known["time"] = f"~{clock(seconds / step * (total - step))}"
    elif job.before:
        known["time"] = "before"
    elif not running and job.seconds:
        known["time"] = clock(job.seconds)
    return known


def _outlook(job: Job) -> dict[str, str]:
    """What a check found."""
    found = folders.read_json(job.folder / CHECK_FILE)
    known = {"time": clock(job.seconds)} if job.seconds and job.status != "running" else {}
    if found.get("step_ms"):
        known["step_ms"] = f"{found['step_ms']:.4g}"
    if found.get("peak_bytes"):
        known["peak"] = size(found["peak_bytes"])
    if found.get("phase"):
        known["phase"] = found["phase"]
    return known


def _result(job: Job) -> dict[str, Any]:
    result = folders.read_json(job.folder / "result.json")
    told = result.get("summary")
    summary = told if isinstance(told, dict) else {}
    return {
        "step": number_in(result, "step"),
        "step_ms": number_in(summary, "final/perf_step_ms_p50"),
        "train_loss": number_in(summary, "final/train_loss"),
        "val_loss": number_in(summary, "final/val_loss_fp32"),
    }


def _progress(job: Job) -> dict[str, Any]:
    """The last line of metrics.jsonl, read from its end: a long run's is large."""
    told = folders.read_status(job.folder)
    if told.get("pid") != job.pid:  # an earlier attempt's, until this one has made the folder its own
        return {}
    try:
        with (job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            last = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):  # none yet, or half of one
        last = {}
    line = last if isinstance(last, dict) else {}
    return {
        "step": number_in(line, "train/step"),
        "total_steps": told.get("total_steps"),
        "elapsed_s": number_in(line, "perf/elapsed_s"),
        "step_ms": number_in(line, "perf/step_ms_p50"),
        "train_loss": number_in(line, "train/loss"),
        "val_loss": number_in(line, "val/loss_fp32"),
    }


def clock(seconds: float) -> str:
    """`8 s`, `4 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
