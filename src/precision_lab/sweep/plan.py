"""Which jobs a sweep has and in which order they run. No torch, and nothing is written.

Arms are interleaved seed by seed, their order rotated, so that a drift of the machine and a cold
start hit all arms alike.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from precision_lab import folders, identity
from precision_lab.config import Config, OnUnsupported, PrecisionConfig
from precision_lab.errors import InputError
from precision_lab.redaction import redact, secrets_in


@dataclass(frozen=True)
class Answer:
    """What the machine says to one job: its resolved arm and device, or why it refuses."""

    refused: str = ""
    wrong: str = ""  # a sentence about the job's input
    precision: PrecisionConfig | None = None
    device: str = ""
    gpus: tuple[int, ...] = ()  # for a job on CUDA: the devices that are of the first one's model
    fingerprint: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Job:
    """One run of a sweep. `status` is a run's, or one of waiting, unsupported, same, checked, elsewhere, not run."""

    overrides: list[str]
    title: str  # the overrides in which it differs from its fellows
    asked: Config
    folder: Path = Path()
    fingerprint: dict[str, Any] = field(default_factory=dict)
    status: str = "waiting"
    reason: str = ""
    pid: int | None = None  # of its process, while it runs
    before: bool = False  # finished by an earlier call, and not run by this one
    seconds: float | None = None  # that it took or has taken
    asked_at: float = field(default_factory=time.time)  # seconds since 1970


def titles(overrides: list[list[str]], secrets: Sequence[str] = ()) -> list[str]:
    """For each job the overrides that not all jobs share, redacted; else its experiment, arm and seed."""
    shared = set.intersection(*map(set, overrides))
    telling = [word for word in sorted(shared) if word.startswith(("experiment=", "precision=", "seed="))]
    own = [[word for word in words if word not in shared] or telling or words for words in overrides]
    known = [*secrets, *secrets_in(os.environ)]
    return [" ".join(redact(words, known)) or "defaults" for words in own]


def settle(jobs: list[Job], answers: list[Answer]) -> list[str]:
    """Give each job what the machine said to it: its resolved arm, its folder, what is known of it from before.

    Returns lines for the reader. InputError for an arm that the machine cannot do, unless such are to be
    skipped, for two jobs that share a folder and differ, for a folder with another machine's run, and for what is
    wrong with the input of a job that would run.
    """
    notes: list[str] = []
    for job, answer in zip(jobs, answers, strict=True):
        if answer.refused:
            job.status, job.reason = "unsupported", answer.refused
            continue
        job.asked = replace(job.asked, precision=answer.precision)
        job.folder, job.fingerprint = folders.job_folder(job.asked, answer.device), answer.fingerprint
        notes += [note for note in answer.notes if note not in notes]
    _refuse_unsupported(jobs)
    _merge_same(jobs)
    for job in jobs:
        if job.status == "waiting" and not job.asked.check:
            status = folders.finished(job.folder, job.asked.rerun, job.fingerprint)
            if status:
                job.status, job.before = status, True
                job.reason = folders.read_status(job.folder).get("reason") or ""
    _refuse_wrong_input([(job, answer) for job, answer in zip(jobs, answers, strict=True) if job.status == "waiting"])
    return notes


def _refuse_unsupported(jobs: list[Job]) -> None:
    refused = [job for job in jobs if job.status == "unsupported"]
    strict = [job for job in refused if job.asked.on_unsupported is OnUnsupported.stop]
    if strict:
        reasons = " ".join(dict.fromkeys(job.reason for job in strict))
        raise InputError(f"{reasons} on_unsupported=skip runs the others.")


def _refuse_wrong_input(answered: list[tuple[Job, Answer]]) -> None:
    found: dict[str, list[str]] = {}
    for job, answer in answered:
        if answer.wrong and not job.asked.check:
            found.setdefault(answer.wrong, []).append(job.title)
    if found:
        raise InputError(*(f"{_some_of(titles)}: {sentence}" for sentence, titles in found.items()))


def _some_of(titles: list[str], shown: int = 3) -> str:
    more = f" and {len(titles) - shown} more" if len(titles) > shown else ""
    return "; ".join(titles[:shown]) + more


def _merge_same(jobs: list[Job]) -> None:
    first: dict[Path, Job] = {}
    for job in [job for job in jobs if job.status == "waiting"]:
        other = first.setdefault(job.folder, job)
        if other is job:
            continue
        if other.asked != job.asked:
            raise InputError(
                f"{other.title} and {job.title} are one and the same run: what differs between the jobs of a sweep "
                "must be part of a run's identity. Run them in two sweeps of different name=..."
            )
        job.status, job.reason = "same", f"the same run as {other.title}"  # precision=auto beside what it chose


def in_turn(jobs: Iterable[Job]) -> list[Job]:
    """The jobs in the order they run: all arms of one experiment and seed, then of the next, rotated.

    Those that will never run stand at the end.
    """
    blocks: dict[tuple[str, int, str], list[Job]] = {}
    idle = []
    for job in jobs:
        if job.status in ("unsupported", "same"):
            idle.append(job)
        else:
            key = (identity.experiment_signature(job.asked), job.asked.seed, job.asked.device.type.name)
            blocks.setdefault(key, []).append(job)
    order: list[Job] = []
    turns: dict[tuple[str, str], int] = {}  # of each experiment and device; each begins with another arm
    for (experiment, _, device), block in blocks.items():
        start = turns.setdefault((experiment, device), len(turns)) % len(block)
        turns[experiment, device] += 1
        order += block[start:] + block[:start]
    return order + idle
