"""What a run shows on the terminal: a progress bar where there is one, and the line that sums it up."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(title: str, total_steps: int) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Yield `show(step, readings)`, called at log points; it does nothing when stdout is no terminal."""
    if not sys.stdout.isatty():
        yield lambda step, readings: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task(title, total=total_steps)

        def show(step: int, readings: Mapping[str, Any]) -> None:
            progress.update(task, completed=step, description=f"{title}, loss {readings['train/loss']:.4f}")

        yield show


def summary_line(arm: str, status: str, reason: str | None, step: int, final: Mapping[str, Any]) -> str:
    """`bf16: completed, 400 steps; val loss 0.0812 (fp32 0.0813), ...`; a figure not measured is left out."""
    head = f"{arm}: {status} at step {step}" + (f" ({reason})" if reason else "")
    parts = [
        _figure(final, "val/loss", "val loss {:.4f}") + _figure(final, "val/loss_fp32", " (in fp32 {:.4f})"),
        _figure(final, "val/accuracy", "accuracy {:.3f}"),
        _figure(final, "perf/step_ms_p50", "{:.3g} ms a step (p50)"),
        _figure(final, "mem/saved_activations_mib", "saved activations {:.3g} MiB"),
        _figure(final, "mem/peak_allocated_gib", "peak {:.3g} GiB"),
        f"{final['amp/skipped_steps']:.0f} steps skipped" if final.get("amp/skipped_steps") else "",
    ]
    return "; ".join([head, ", ".join(part for part in parts if part)])


def _figure(final: Mapping[str, Any], name: str, template: str) -> str:
    return "" if final.get(name) is None else template.format(final[name])
