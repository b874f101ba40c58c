"""Where results lie: folders, W&B's files on this machine, a W&B project. Finds each run's file, and reads its text.

Opens result.json and benchmark.json in folders, and nothing else; what a text says is not looked at here.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from precision_lab.errors import InputError, require
from precision_lab.report.benchmarks import FILE as BENCHMARK
from precision_lab.tracking import inspector, server
from precision_lab.tracking.runs import Kept, Told

RESULT = "result.json"
# W&B's own folders, which hold no result of ours and may be many.
_WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
KINDS = "a source is a folder, wandb:entity/project[?filters], or wandb-offline:DIR"


@dataclass(frozen=True)
class Source:
    """One as typed: `folder` where it lies on this machine, `project` where it is W&B's."""

    text: str
    folder: Path | None = None
    project: server.Project | None = None
    of_wandb: bool = False


@dataclass(frozen=True)
class Record:
    """A run's or a benchmark's text, or the problem where there is none."""

    place: str
    file: str
    text: bytes | str
    problem: str
    of_wandb: bool


def source_of(text: str | os.PathLike[str]) -> Source:
    """What a person typed. InputError where it is no source, or there is nothing."""
    typed = os.fspath(text)
    if typed.startswith("wandb:"):
        return Source(typed, project=server.project_of(typed), of_wandb=True)
    if typed.startswith("wandb-offline:"):
        name = typed.removeprefix("wandb-offline:")
        require(bool(name), f"{typed} names no folder; write wandb-offline:DIR, such as wandb-offline:outputs/wandb.")
        folder = Path(os.path.expanduser(name))  # a shell leaves that to us after a colon
        inspector.files_in(folder)
        return Source(typed, folder, of_wandb=True)
    if not os.path.isdir(typed):
        more = f"; {KINDS}" if _SCHEME.match(typed) else "; name one that holds runs"
        raise InputError(f"{typed} is not a folder{more}.")
    return Source(typed, Path(typed))


def records(sources: Sequence[Source], cache: Path | None = None) -> Iterator[Record]:
    """Every run and benchmark of the sources, in their order. `cache` is where what W&B told is kept.

    W&B's runs of other job types are passed over, and those that another one took the place of.
    """
    kept = Kept(cache)
    told = {id(source): _told(source, kept) for source in sources if source.of_wandb}
    replaced = {run_id for runs in told.values() for run in runs for run_id in run.replaces}
    seen: set[tuple[int, int]] = set()
    for source in sources:
        if not source.of_wandb:
            yield from _of_folders(source.text, seen)
        for run in told.get(id(source), ()):
            if run.file and run.id not in replaced:
                yield Record(run.place, run.file, run.text or "", run.problem, True)


def _told(source: Source, kept: Kept) -> list[Told]:
    return server.runs_of(source.project, kept) if source.project else inspector.runs_in(source.folder, kept)


def _of_folders(top: str, seen: set[tuple[int, int]]) -> Iterator[Record]:
    """What lies below a folder, but not below one of a run or a benchmark. `seen` were looked through before."""
    todo = [top]
    while todo:
        folder = todo.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:  # named twice, or linked to
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                inside = {entry.name: entry for entry in entries}
            below = [name for name in inside if _is_folder(inside[name]) and not _WANDB_RUN.match(name)]
        except OSError as error:
            yield Record(folder, RESULT, "", f"cannot be opened ({error.strerror})", False)
            continue
        file = next((name for name in (RESULT, BENCHMARK) if name in inside), "")
        if file:
            yield _read(folder, file)
        elif "status.json" in inside:
            yield Record(folder, RESULT, "", "no result yet: still running, or killed", False)
        else:
            todo += [os.path.join(folder, name) for name in sorted(below, reverse=True)]


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a closed folder
        return False


def _read(folder: str, name: str) -> Record:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return Record(folder, name, "", f"{name} is not a file", False)
    try:
        with open(path, "rb") as file:
            return Record(folder, name, file.read(), "", False)
    except OSError as error:
        return Record(folder, name, "", f"{name} cannot be read ({error.strerror})", False)
