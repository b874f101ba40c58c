"""A sweep, start to end: survey, plan, run, tell. No torch, no Hydra."""

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from precision_lab.config import ROOT, Config, as_values
from precision_lab.errors import InputError
from precision_lab.folders import require_no_name, sweep_folder
from precision_lab.redaction import secrets_in
from precision_lab.sweep.earlier import what_differs
from precision_lab.sweep.launch import places_for, run_jobs
from precision_lab.sweep.plan import Job, in_turn, settle, titles
from precision_lab.sweep.space import require_space
from precision_lab.sweep.survey import survey
from precision_lab.sweep.view import View


def lead(composed: list[tuple[Config, list[str]]], write_command: Callable[[Path, list[str]], None]) -> int:
    """Run the jobs, given as config and overrides each; return the sweep's exit code.

    InputError before anything is written: an arm that the machine cannot do, jobs that cannot be told apart, or a
    disk without room for them. `write_command` is called once, before the first job, with the sweep's folder and
    the secrets it must not write.
    """
    if not composed:
        raise InputError("The sweep has no job: a key was given an empty range of values.")
    for asked, _ in composed:
        require_no_name(asked)
    words = [word for _, overrides in composed for word in overrides]
    secrets = secrets_in({}, [as_values(asked) for asked, _ in composed], words)
    names = titles([overrides for _, overrides in composed], secrets)
    jobs = [Job(overrides, name, asked) for (asked, overrides), name in zip(composed, names, strict=True)]
    answers = survey([job.asked for job in jobs], try_input=not jobs[0].asked.check)  # a check tries each job itself
    notes = settle(jobs, answers)
    jobs = in_turn(jobs)
    places = places_for(next((answer.gpus for answer in answers if answer.gpus), ()))
    view = View(jobs, secrets, len(places))
    if jobs[0].asked.check:
        with tempfile.TemporaryDirectory() as elsewhere:  # a check leaves nothing
            for number, job in enumerate(jobs):
                job.folder = Path(elsewhere) / str(number)
            return _run(jobs, places, view, notes)
    notes += what_differs(jobs)
    folder = sweep_folder(jobs[0].asked)
    try:
        require_space(jobs)
        write_command(folder, secrets)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); set paths.outputs.") from error
    code = _run(jobs, places, view, notes)
    compared = sorted({_short(sweep_folder(job.asked)) for job in jobs})
    view.say(f"compare: python scripts/compare.py {shlex.join(compared)}")
    return code


def _run(jobs: list[Job], places: list[dict[str, str]], view: View, notes: list[str]) -> int:
    view.begin(notes)
    with view:
        code = run_jobs(jobs, places, view)
    view.summary()
    return code


def _short(folder: Path) -> str:
    return str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)
