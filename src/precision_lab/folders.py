"""Where a run's files lie and who may write them. No torch.

A single run's folder is named by time and made new. A job of a sweep has its folder named by
content, so that the same command finds what it has finished: `claim` hands it to one process at a
time, and only if there is something to do. What an earlier attempt left is kept under `attempts/`.
"""

import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from precision_lab import identity
from precision_lab.config import Config, Rerun, as_values, sweep_name
from precision_lab.errors import InputError
from precision_lab.redaction import redact, secrets_in
from precision_lab.streams import lossy

LOG = "train.log"
# The statuses that a sweep leaves as they are; of any other a run is missing, a dead process's `running` too.
RESULTS = {"completed", "diverged", "out_of_memory"}
FINISHED = {Rerun.never: RESULTS | {"failed"}, Rerun.failed: RESULTS, Rerun.all: set()}


class Busy(Exception):
    """Another process is running this job: the text says which."""


def outputs(asked: Config) -> Path:
    """`paths.outputs`, absolute: a user's code may change the working directory."""
    return Path(asked.paths.outputs).absolute()


def new_folder(asked: Config, device: str) -> Path:
    """Make the folder of a single run: `runs/<date>/<time with microseconds>_<slug>`."""
    now = datetime.now()
    name = f"{now:%H-%M-%S-%f}_{identity.slug(asked, device)}"
    folder = outputs(asked) / "runs" / f"{now:%Y-%m-%d}" / name
    return _made(folder)


def benchmark_folder(asked: Config) -> Path:
    """Make the folder of a benchmark: of a named experiment beside its runs, `sweeps/<name>/benchmarks/<time>`."""
    now = datetime.now()
    if asked.name:
        folder = sweep_folder(asked) / "benchmarks" / f"{now:%Y-%m-%d_%H-%M-%S-%f}"
    else:
        what = "_".join(identity.slug(asked, "benchmark").split("_")[:2])
        name = f"{now:%H-%M-%S-%f}_{what}_{identity.experiment_signature(asked)}"
        folder = outputs(asked) / "benchmarks" / f"{now:%Y-%m-%d}" / name
    return _made(folder)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _cannot_be_made(folder, error) from error
    return folder


def open_log(folder: Path) -> TextIO:
    """The run's own log, for more lines at its end, as far as the disk takes them."""
    return lossy(folder / LOG)


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
    status = read_json(folder / "status.json").get("status")
    if not isinstance(status, str) or status not in FINISHED[rerun]:
        return None
    made_on = read_json(folder / "result.json").get("fingerprint")
    if not made_on:  # lost or damaged: what it found is to be found again
        return None
    if made_on != fingerprint:
        keys = [key for key in {**made_on, **fingerprint} if made_on.get(key) != fingerprint.get(key)]
        differ = ", ".join(f"{key} {made_on.get(key)}, here {fingerprint.get(key)}" for key in keys)
        raise InputError(
            f"{folder} was run on other hardware ({differ}); set name or paths.outputs for runs of their own, "
            "or rerun=all to run them again."
        )
    return status


def claim(folder: Path, rerun: Rerun, fingerprint: dict[str, Any]) -> tuple[TextIO | None, str | None]:
    """Take hold of a job's folder: (its open log, None), or (None, status) if the job is finished.

    The lock lies on the log and goes with the process, however it ends. Raises Busy or InputError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = open_log(folder)
    except OSError as error:
        raise _cannot_be_made(folder, error) from error
    try:
        _lock(log)
        status = finished(folder, rerun, fingerprint)
        if status is None:
            _set_aside(folder)
            return log, None
    except BaseException:
        log.close()
        raise
    log.close()
    return None, status


def _lock(log: TextIO) -> None:
    # lockf, not flock: a data worker that outlives its parent would go on holding a flock
    try:
        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise Busy(owner(Path(log.name).parent)) from error
    except OSError as error:
        raise InputError(f"{log.name} cannot be locked ({error.strerror}); set paths.outputs.") from error


def _set_aside(folder: Path) -> None:
    """Move an earlier attempt's files to `attempts/<n>`; the log is continued."""
    attempts = folder / "attempts"
    left = [path for path in folder.iterdir() if path.name not in (LOG, attempts.name)]
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
    told = read_json(folder / "status.json")
    try:
        since = datetime.fromtimestamp(told["started"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "another process"
    if told.get("status") != "running":  # an earlier one's: it has only just begun
        return "another process"
    day = "" if since.date() == datetime.now().date() else f"{since:%Y-%m-%d} "
    return f"pid {told.get('pid')} on {told.get('host')} since {day}{since:%H:%M}"


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it is missing, damaged or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _cannot_be_made(folder: Path, error: OSError) -> InputError:
    return InputError(f"The run folder {folder} cannot be made ({error.strerror}); set paths.outputs.")
