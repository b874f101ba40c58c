"""Where a run's files lie and who may write them. No torch.

A single run's folder is named by time and made new. A job of a sweep has its folder named by
content, so that the same command finds what it has finished: `claim` hands it to one process at a
time, and only if there is something to do. What an earlier attempt left, and a new one does not go on
with, is kept under `attempts/`.
"""

import errno
import fcntl
import json
import math
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from precision_lab import identity
from precision_lab.config import Config, Rerun, as_values, sweep_name
from precision_lab.errors import InputError, require
from precision_lab.recorder import writing
from precision_lab.redaction import redact, secrets_in
from precision_lab.streams import lossy

LOG = "train.log"
ATTEMPTS = "attempts"
LEDGER = "wandb.json"  # of what W&B has of the folder, over all attempts
# The statuses that a sweep leaves as they are; of any other a run is missing, a dead process's `running` too.
RESULTS = {"completed", "diverged", "out_of_memory"}
STOPPED = {"running", "interrupted"}
STATUS_KINDS = {
    "status": str, "reason": str, "pid": int, "host": str, "started": int | float, "updated": int | float,
    "total_steps": int, "step": int,
}  # fmt: skip
FINISHED = {Rerun.never: RESULTS | {"failed"}, Rerun.failed: RESULTS, Rerun.all: set()}


class Busy(Exception):
    """Another process is running this job: the text says which."""


@dataclass(frozen=True)
class Claim:
    """A run's folder that this process holds, as long as the log is open."""

    folder: Path
    log: TextIO | None  # for more lines at its end; None: the job is finished
    status: str | None = None  # in which an earlier attempt left it
    named: bool = False  # by the user, to go on with
    checkpoint: Path | None = None  # in it, if the user named that

    @property
    def stopped(self) -> bool:
        """Whether an earlier attempt was stopped or killed before its end."""
        return self.status in STOPPED

    def goes_on(self, asked: Config) -> bool:
        """Whether to go on with what that attempt left."""
        return self.stopped and {"auto": asked.rerun is not Rerun.all, "never": False}.get(asked.trainer.resume, True)


def outputs(asked: Config) -> Path:
    """`paths.outputs`, absolute: a user's code may change the working directory."""
    return Path(asked.paths.outputs).absolute()


def outputs_above(folder: Path) -> Path:
    """The outputs folder that a run's or a benchmark's folder lies in; the one above it where it lies elsewhere."""
    above = folder.absolute().parents
    names = [one.name for one in above]
    if names[:1] == ["benchmarks"] and names[2:3] == ["sweeps"]:
        return above[3]
    return above[2] if names[1:2] and names[1] in ("runs", "sweeps", "benchmarks") else above[0]


def slug_of(folder: Path) -> str:
    """The slug that a run's folder is named by, without the time in a single run's."""
    return re.sub(r"^\d\d-\d\d-\d\d-\d{6}_", "", folder.name)


def claim_single(asked: Config, device: str) -> Claim:
    """The folder of a single run: the newest that was stopped and can go on, by `trainer.resume`, or a new one.

    InputError where the user named one that cannot go on.
    """
    slug, resume = identity.slug(asked, device), asked.trainer.resume
    if resume not in ("auto", "never"):
        return _named(Path(resume).absolute())
    runs = outputs(asked) / "runs"
    may_go_on = resume == "auto" and asked.rerun is not Rerun.all
    for folder in sorted(runs.glob(f"*/*_{slug}"), reverse=True) if may_go_on else []:
        if read_status(folder).get("status") in STOPPED and any(folder.glob("checkpoints/step_*.pt")):
            with suppress(Busy, InputError):  # it is being run: this one is another
                claim = hold(folder)
                if claim.stopped:  # still: whoever ran it may have come to the end just now
                    return claim
                claim.log.close()
    now = datetime.now()
    return hold(_made(runs / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S-%f}_{slug}"))


def check_named(asked: Config) -> None:
    """InputError where the run that `trainer.resume` names cannot go on, as far as its folder tells without torch."""
    if asked.trainer.resume not in ("auto", "never"):
        path = Path(asked.trainer.resume).absolute()
        _check_stopped(path, read_status(_folder_of(path)).get("status"))


def require_no_name(asked: Config) -> None:
    """InputError where `trainer.resume` names one run, in a sweep."""
    require(
        asked.trainer.resume in ("auto", "never"),
        f"trainer.resume={asked.trainer.resume} names one run, and a sweep has several; valid here are auto, by "
        "which each job goes on where it was stopped, and never.",
    )


def _folder_of(path: Path) -> Path:
    """The run's folder, which `path` is or in which it is a checkpoint."""
    folder = path if path.is_dir() else path.parent.parent
    if not (folder / "status.json").is_file():
        hint = "a run's folder"
        if not path.is_dir():
            hint = "a checkpoint in a run's folder; trainer.init_from takes the weights alone"
        raise InputError(f"trainer.resume={path} is not {hint}.")
    return folder


def _check_stopped(path: Path, status: str | None) -> None:
    if status is None:
        raise InputError(f"trainer.resume={path}: its status.json is damaged, so that nobody knows how far it came.")
    if status not in STOPPED:
        raise InputError(f"trainer.resume={path}: that run has ended ({status}), there is nothing to go on with.")


def _named(path: Path) -> Claim:
    folder = _folder_of(path)
    try:
        claim = hold(folder)
    except Busy as error:
        raise InputError(f"trainer.resume={path}: another process is running it.") from error
    try:
        _check_stopped(path, claim.status)
    except InputError:
        claim.log.close()
        raise
    return replace(claim, named=True, checkpoint=None if path.is_dir() else path)


def hold(folder: Path, name: str = LOG) -> Claim:
    """Take hold of a run's folder as it is, by that file. Raises Busy, or InputError where that is not possible."""
    try:
        log = open_log(folder, name)
    except OSError as error:
        raise _cannot_be_made(folder, error) from error
    try:
        _lock(log)
    except BaseException:
        log.close()
        raise
    return Claim(folder, log, read_status(folder).get("status"))


def benchmark_folder(asked: Config) -> Path:
    """Make the folder of a benchmark: of a named experiment beside its runs, `sweeps/<name>/benchmarks/<time>`."""
    return timed_folder(asked, "benchmarks")


def timed_folder(asked: Config, kind: str) -> Path:
    """Make a new folder for what is no run, such as `benchmarks`: of a named experiment beside its runs."""
    now = datetime.now()
    if asked.name:
        folder = sweep_folder(asked) / kind / f"{now:%Y-%m-%d_%H-%M-%S-%f}"
    else:
        what = "_".join(identity.slug(asked, kind).split("_")[:2])
        name = f"{now:%H-%M-%S-%f}_{what}_{identity.experiment_signature(asked)}"
        folder = outputs(asked) / kind / f"{now:%Y-%m-%d}" / name
    return _made(folder)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _cannot_be_made(folder, error) from error
    return folder


def open_log(folder: Path, name: str = LOG) -> TextIO:
    """The run's own log, for more lines at its end, as far as the disk takes them. OSError if it is no file."""
    path = folder / name
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, f"its {name} is not a file", str(path))
    return lossy(path)


def sweep_folder(asked: Config) -> Path:
    """`sweeps/<name>`: the jobs of one experiment, whenever they ran. A secret in the name is no part of it."""
    name = redact(asked.name, secrets_in({}, as_values(asked)))
    return outputs(asked) / "sweeps" / sweep_name(name)


def job_folder(asked: Config, device: str) -> Path:
    """`sweeps/<name>/<slug>`: by content alone, whoever runs it. Not made yet."""
    return sweep_folder(asked) / identity.slug(asked, device)


def finished(folder: Path, rerun: Rerun, fingerprint: dict[str, Any]) -> str | None:
    """The status of a job that is not to be run again; None where it is missing or asked for again.

    InputError if it was run on other hardware than `fingerprint`: its figures are not this machine's.
    """
    status = read_status(folder).get("status")
    if status not in FINISHED[rerun]:
        return None
    made_on = read_json(folder / "result.json").get("fingerprint")
    if not isinstance(made_on, dict) or not made_on:  # lost or damaged: what it found is to be found again
        return None
    if made_on != fingerprint:
        differ = ", ".join(f"{key} {was}, here {now}" for key, was, now in identity.differing(made_on, fingerprint))
        raise InputError(
            f"{folder} was run on other hardware ({differ}); set name or paths.outputs for runs of their own, "
            "or rerun=all to run them again."
        )
    return status


def claim(folder: Path, rerun: Rerun, fingerprint: dict[str, Any], asked_at: float = math.inf) -> Claim:
    """Take hold of a job's folder, which is made if need be; nothing in it is changed.

    `rerun` is about ends that were there when it was asked for, `asked_at` in seconds since 1970: another process may
    have run the job since. The lock lies on the log and goes with the process, however it ends. Raises Busy or
    InputError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(folder, error) from error
    claim = hold(folder)
    try:
        since = read_status(folder).get("updated", 0.0) > asked_at
        status = finished(folder, Rerun.never if since else rerun, fingerprint)
    except BaseException:
        claim.log.close()
        raise
    if status is None:
        return claim
    claim.log.close()
    return Claim(folder, None, status)


def _lock(log: TextIO) -> None:
    # lockf, not flock: a data worker that outlives its parent would go on holding a flock
    try:
        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise Busy(owner(Path(log.name).parent)) from error
    except OSError as error:
        raise InputError(f"{log.name} cannot be locked ({error.strerror}); set paths.outputs.") from error


def held(folder: Path) -> bool:
    """Whether another process runs the job. Not for a process that holds the folder: its lock goes by asking."""
    path = folder / LOG
    if not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as log:  # closing it drops every lock that this process has on the file
        try:
            fcntl.lockf(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False  # or it cannot be asked: whoever claims it next says so


def set_aside(folder: Path) -> None:
    """Move an earlier attempt's files to `attempts/<n>`; log and ledger are continued. Raises CannotWrite."""
    attempts = folder / ATTEMPTS
    with writing(attempts):
        left = [path for path in folder.iterdir() if path.name not in (LOG, LEDGER, attempts.name)]
        if left:
            attempts.mkdir(exist_ok=True)
            numbers = [int(path.name) for path in attempts.iterdir() if path.name.isdigit()]
            target = attempts / str(max(numbers, default=0) + 1)
            target.mkdir()
        # status.json first: a kill in between must not leave a finished job without its result
        for path in sorted(left, key=lambda path: path.name != "status.json"):
            path.rename(target / path.name)


def owner(folder: Path) -> str:
    """Who runs a job, by its own word: `pid 123 on HOST since 14:02`."""
    told = read_status(folder)
    try:
        since = datetime.fromtimestamp(told["started"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "another process"
    if told.get("status") != "running":  # an earlier one's: it has only just begun
        return "another process"
    day = "" if since.date() == datetime.now().date() else f"{since:%Y-%m-%d} "
    return f"pid {told.get('pid')} on {told.get('host')} since {day}{since:%H:%M}"


def read_file(path: Path) -> bytes:
    """What a file holds. OSError for what is none: a pipe would make the reader wait, and a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    return path.read_bytes()


def read_status(folder: Path) -> dict[str, Any]:
    """What a run's status.json says, as far as its values are of the kind that they have to be."""
    return {
        key: value
        for key, value in read_json(folder / "status.json").items()
        if isinstance(value, STATUS_KINDS.get(key, object)) and not isinstance(value, bool)
    }


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it is missing, damaged or no object."""
    try:
        values = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _cannot_be_made(folder: Path, error: OSError) -> InputError:
    return InputError(f"The run folder {folder} cannot be made ({error.strerror}); set paths.outputs.")
