"""What a run shows on the terminal: a progress bar where there is one, and the lines that sum it up."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

CHECKED = "nothing was trained."
CHECK_FILE = "check.json"  # what a job of a sweep writes that was only checked
BUSY = ": being run by "


@contextmanager
def bar(title: str, total_steps: int) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Yield `show(step, readings)`, called at log points; it does nothing when stdout is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        yield lambda step, readings: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # drawn at log points alone: a refreshing thread would take its time out of the steps
    with Progress(*columns, console=Console(), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title, total=total_steps)

        def show(step: int, readings: Mapping[str, Any]) -> None:
            description = f"{title}, loss {readings['train/loss']:.4f}"
            progress.update(task, completed=step, description=description, refresh=True)

        yield show


def summary_lines(arm: str, status: str, reason: str | None, step: int, final: Mapping[str, Any]) -> str:
    """What came out, in lines of under 80 columns but for the reason; a figure not measured is left out.

    `bf16: completed at step 400` / `val loss 0.0812 (in fp32 0.0813), accuracy 0.983` / `5.93 ms a step ...`
    """
    steps, skipped = final.get("perf/measured_steps"), final.get("amp/skipped_steps")
    parts = [
        [
            _figure(final, "val/loss", "val loss {:.4f}") + _figure(final, "val/loss_fp32", " (in fp32 {:.4f})"),
            _figure(final, "val/accuracy", "accuracy {:.3f}"),
            f"{skipped:.0f} update{'s' if skipped > 1 else ''} skipped" if skipped else "",
        ],
        [
            _figure(final, "perf/step_ms_p50", "{:.3g} ms a step (median of " + f"{steps}; ")
            + _figure(final, "perf/step_ms_p95", "95 % below {:.3g})"),
        ],
        [
            _figure(final, "mem/saved_activations_mib", "saved activations {:.3g} MiB"),
            _figure(final, "mem/peak_allocated_gib", "peak allocated {:.3g} GiB"),
        ],
    ]
    lines = [f"{arm}: {status} at step {step}" + (f" ({reason})" if reason else "")]
    lines += ["  " + ", ".join(filter(None, line)) for line in parts if any(line)]
    return "\n".join(lines)


def what_went_wrong(nonfinite: Mapping[str, int | None], diverged: bool, folder: Path) -> str:
    """At which step something first was not finite, and the command that shows where; empty if that is no trouble.

    Skipped steps by which a scaler finds its scale are none, as long as the losses are finite.
    """
    if step := nonfinite["first_loss"]:
        what = f"The loss of step {step} is the first that was not finite"
    elif diverged and (step := nonfinite["last_streak_from"] or nonfinite["first_step"]):
        what = f"The gradients from step {step} on were not finite"
    else:
        return ""
    return f"{what}. See where: python scripts/replay.py run={shlex.quote(str(folder))}"


def _figure(final: Mapping[str, Any], name: str, template: str) -> str:
    return "" if final.get(name) is None else template.format(final[name])
