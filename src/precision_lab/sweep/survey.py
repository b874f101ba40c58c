"""What this machine can do, asked in a process of its own: the one that leads a sweep never loads torch."""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

from precision_lab import folders
from precision_lab.config import Config, OnUnsupported
from precision_lab.errors import Ended, InputError
from precision_lab.stops import handled_by
from precision_lab.sweep.plan import Answer


def survey(jobs: list[Config], try_input: bool = False) -> list[Answer]:
    """An answer for each job; Ended by a signal to stop, which the process asked does not outlive.

    With `try_input` also what is wrong with the input of those that are not finished, see `trial`.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that what it forks can be ended with it
    )
    try:
        with handled_by(_end):
            out, err = process.communicate(pickle.dumps((sys.path, jobs, try_input)))
    except Ended:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        last = (err.decode(errors="replace").strip().splitlines() or ["no word of why"])[-1]
        raise InputError(f"torch could not tell what this machine can do (exit code {process.returncode}): {last}")
    return pickle.loads(out)


def _end(number: int, frame: Any) -> None:
    raise Ended(130 if number == signal.SIGINT else 143)


def _answer(asked: Config, threads: int) -> Answer:
    import torch

    from precision_lab import hardware
    from precision_lab.assemble import resolve

    torch.set_num_threads(threads)  # an earlier question may have set its own
    try:
        resolved = resolve(asked)
    except InputError as error:
        return Answer(refused=str(error))
    wrong, gpus = "", ()
    try:
        hardware.memory_fraction(asked.device, resolved.device)
    except InputError as error:
        wrong = str(error)
    if resolved.device.type == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        gpus = tuple(number for number, name in enumerate(names) if name == names[0])
    return Answer(
        wrong=wrong,
        precision=resolved.asked.precision,
        device=resolved.device.type,
        gpus=gpus,
        fingerprint=hardware.fingerprint(resolved.device),
        notes=tuple(resolved.notes),
    )


def main() -> None:
    """The process asked: configs come in at stdin, answers go out at stdout."""
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever an import prints is no part of the answer
    path, jobs, try_input = pickle.load(sys.stdin.buffer)
    import torch

    sys.path[:] = path  # so that a `_target_` is found as in a run
    threads = torch.get_num_threads()
    answers = [_answer(asked, threads) for asked in jobs]
    strict = any(
        a.refused and asked.on_unsupported is OnUnsupported.stop for asked, a in zip(jobs, answers, strict=True)
    )
    if try_input and not strict:  # else nothing is run anyway
        answers = _with_wrong_input(jobs, answers)
    out.write(pickle.dumps(answers))
    out.flush()


def _with_wrong_input(jobs: list[Config], answers: list[Answer]) -> list[Answer]:
    from precision_lab.sweep.trial import wrong_input

    tried = [number for number, answer in enumerate(answers) if _would_run(jobs[number], answer)]
    resolved = [replace(jobs[number], precision=answers[number].precision) for number in tried]
    found = dict(zip(tried, wrong_input(resolved), strict=True))
    return [replace(answer, wrong=answer.wrong or found.get(number, "")) for number, answer in enumerate(answers)]


def _would_run(asked: Config, answer: Answer) -> bool:
    if answer.refused:
        return False
    folder = folders.job_folder(replace(asked, precision=answer.precision), answer.device)
    try:
        return folders.finished(folder, asked.rerun, answer.fingerprint) is None
    except InputError:  # told when the sweep is planned
        return False
