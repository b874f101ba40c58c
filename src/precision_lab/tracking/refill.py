"""Folders of runs and benchmarks turned into W&B runs, later: made with W&B disabled, degraded, or killed. No torch.

What W&B has of a folder stands in its ledger, so that doing this twice adds nothing. A folder is only read, but for the
ledger, and for what W&B's files held of an earlier attempt, which go to its `attempts/`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_lab import folders, identity
from precision_lab.config import Extra, WandbConfig, WandbMode
from precision_lab.errors import InputError
from precision_lab.recorder import STATUSES, CannotWrite, append, number_in, restored
from precision_lab.run_folder import log_points, typed_config, values_of
from precision_lab.tracking.of_benchmark import DAMAGED, BenchmarkMirror
from precision_lab.tracking.of_folder import FolderMirror, ledger_of, memory_rows
from precision_lab.tracking.words import words_of

BENCHMARK = "benchmark.json"
SLACK = 5  # times the patience of a training, which waits for nobody
KILLED = "killed: no process runs it, and it left no result"


@dataclass(frozen=True)
class Wish:
    """What to do: `project` and `extras` take the place of the run's own; `again`: also what W&B has whole."""

    mode: WandbMode
    project: str | None = None
    extras: list[Extra] | None = None
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one folder: `kind` is mirrored, whole before, left out or degraded."""

    folder: Path
    kind: str
    text: str  # where it is, or why not


def refill(tops: list[Path], wish: Wish) -> Iterator[Outcome]:
    """Mirror every run and benchmark below some folders that W&B does not have whole; an outcome each, as it comes.

    Ends where W&B failed twice in a row: it is not the folder then. InputError for a folder that is none.
    """
    for top in tops:
        if not top.is_dir():
            raise InputError(f"{top} is not a folder; name one that holds runs.")
    failed = 0
    for folder in dict.fromkeys(found.resolve() for top in tops for found in _made_below(top)):
        try:
            outcome = _refill_one(folder, wish)
        except _LeftOut as error:
            outcome = Outcome(folder, "left out", str(error))
        yield outcome
        failed = failed + 1 if outcome.kind == "degraded" else 0
        if failed == 2:
            return


class _LeftOut(Exception):
    """A folder that cannot be mirrored: the text says why."""


def _made_below(top: Path) -> Iterator[Path]:
    """Every folder of a run or a benchmark. What lies below one is its own affair."""
    for place, below, files in os.walk(top):
        if {"status.json", BENCHMARK} & set(files):
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if name != "wandb")


def _refill_one(folder: Path, wish: Wish) -> Outcome:
    of_run = not (folder / BENCHMARK).is_file()
    name = folders.LOG if of_run else BENCHMARK
    with ExitStack() as held:
        try:
            held.enter_context(folders.hold(folder, name).log)
        except folders.Busy as owner:
            raise _LeftOut(f"is being run, or mirrored ({owner})") from owner
        except InputError as error:
            raise _LeftOut(
                f"cannot be taken hold of ({getattr(error.__cause__, 'strerror', None) or error})"
            ) from error
        status, reason, lines, begin = (_run if of_run else _benchmark)(folder, wish)
        ledger = ledger_of(folder)
        if not wish.again and _is_whole(folder, ledger, status, len(lines)):
            return Outcome(folder, "whole before", ledger.mode or "by an earlier version")
        try:
            append(folder / folders.LEDGER, b"")
        except CannotWrite as error:  # the next time would mirror it again
            raise _LeftOut(str(error)) from error
        mirror: FolderMirror = begin()
        for line in lines:
            mirror.log(line)
        mirror.finish(status, reason, late=True)
        if mirror.state == "degraded":
            return Outcome(folder, "degraded", f"W&B has no whole run of it ({mirror.ledger.id or 'none begun'})")
        where = mirror.ledger.url or mirror.ledger.id
        return Outcome(folder, "mirrored", f"{status}, {len(lines)} log points, {mirror.state}: {where}")


def _is_whole(folder: Path, ledger: Any, status: str, lines: int) -> bool:
    if ledger.id is None:  # of a version that kept none: closed by W&B, or never begun
        return folders.read_json(folder / "status.json").get("wandb") in ("offline", "online")
    return ledger.whole and (ledger.status, ledger.lines) == (status, lines)


_Prepared = tuple[str, str | None, list[dict[str, Any]], Callable[[], FolderMirror]]


def _run(folder: Path, wish: Wish) -> _Prepared:
    """Its status, the reason, its log points, and what begins its W&B run. Raises _LeftOut."""
    result, state = folders.read_json(folder / "result.json"), folders.read_status(folder)
    environment = folders.read_json(folder / "environment.json") | result
    status, reason = result.get("status"), result.get("reason")
    if status not in STATUSES:
        status, reason = "interrupted", KILLED
    try:
        config = result.get("config") or values_of(folder)
        if "arm" in result:
            arm, experiment = result["arm"], result["experiment_signature"]
        else:
            typed = typed_config(config, str(folder / "config.yaml"))
            arm, experiment = identity.arm_label(typed.precision), identity.experiment_signature(typed)
        words = words_of(config, arm, experiment, environment, environment["fingerprint"]["device"])
        asked = _asked(config, wish)
        memory_rows(result), dict(result.get("summary", {}))  # as they will be handed over
    except (KeyError, TypeError, AttributeError, ValueError, InputError) as error:
        raise _LeftOut(f"its files do not tell what was run ({type(error).__name__}: {error})") from error
    lines = [_timed(restored(line), state.get("started")) for line in log_points(folder)]

    def begin() -> FolderMirror:
        outputs, name = folders.outputs_above(folder), folders.slug_of(folder)
        settings = _of_then(environment["host"])
        return FolderMirror(folder, outputs, asked, SLACK, name=name, job_type="train", settings=settings, **words)

    return status, reason, lines, begin


def _timed(line: dict[str, Any], started: float | None) -> dict[str, Any]:
    """With the time of the log point, which versions before this one did not record."""
    if "perf/unix_s" in line or started is None:
        return line
    return line | {"_timestamp": started + (number_in(line, "perf/elapsed_s") or 0.0)}


def _benchmark(folder: Path, wish: Wish) -> _Prepared:
    told = folders.read_json(folder / BENCHMARK)
    try:
        asked = _asked(told["config"], wish)
        status = "interrupted" if told["stopped_by"] == "interrupted" else "completed"
    except (KeyError, TypeError, AttributeError) as error:
        raise _LeftOut(f"{BENCHMARK} is damaged, or of an older version") from error

    def begin() -> FolderMirror:
        try:
            outputs, settings = folders.outputs_above(folder), _of_then(told["host"])
            return BenchmarkMirror(folder, outputs, told, asked, SLACK, settings)
        except DAMAGED as error:
            raise _LeftOut(f"{BENCHMARK} is damaged, or of an older version") from error

    return status, None, [], begin


def _of_then(host: str) -> dict[str, Any]:
    """W&B's settings by which it tells nothing of this machine, now: the run's config has its own commit."""
    return {"host": host, "disable_git": True, "x_disable_stats": True}


def _asked(config: dict[str, Any], wish: Wish) -> WandbConfig:
    own = config.get("wandb") or {}
    extras = [Extra[name] for name in own.get("extras") or []] if wish.extras is None else wish.extras
    return WandbConfig(wish.mode, wish.project or own.get("project") or "precision-lab", own.get("group"), extras)
