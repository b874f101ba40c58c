"""What this machine can do, asked in a process of its own: the one that leads a sweep never loads torch."""

import pickle
import signal
import subprocess
import sys
from typing import Any

from precision_lab.config import Config
from precision_lab.errors import Ended, InputError
from precision_lab.stops import handled_by
from precision_lab.sweep.plan import Answer


def survey(jobs: list[Config]) -> list[Answer]:
    """An answer for each job; Ended by a signal to stop, which the process asked does not outlive."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with handled_by(_end):
            out, err = process.communicate(pickle.dumps(jobs))
    except Ended:
        process.kill()
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
    gpus: tuple[int, ...] = ()
    if resolved.device.type == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        gpus = tuple(number for number, name in enumerate(names) if name == names[0])
    return Answer(
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
    jobs = pickle.load(sys.stdin.buffer)
    import torch

    threads = torch.get_num_threads()
    out.write(pickle.dumps([_answer(asked, threads) for asked in jobs]))
    out.flush()
