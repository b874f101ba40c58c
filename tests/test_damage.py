"""Damaged run folders: whatever lies there, each command that meets it says what is wrong in a sentence, or goes on.

The runs are real. A command runs in a fork of this process, so that what needs torch does not load it again; the CPU
seconds of a refusal are counted.
"""

import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import rich.console

import damage
from precision_lab import folders
from precision_lab import run as run_module
from precision_lab.config import compose
from precision_lab.entry import exit_code
from precision_lab.hardware import fingerprint
from precision_lab.sweep.earlier import what_differs
from precision_lab.sweep.plan import Answer, Job, settle
from precision_lab.sweep.view import View
from test_resume import LOG_POINTS, MLP, WORDS, attempt, killed
from typed_scripts import module

LIMIT_S = 90  # that a command may take before it counts as hanging
REFUSAL_S = {"compare": 1.5, "replay": 1.5}  # of the others too, but for what torch is needed to find
ENDS = ("finished", "stopped", "diverged")
COMMANDS = ("compare", "resume", "same command", "sweep", "replay")


@dataclass
class Said:
    code: int
    text: str
    cpu_s: float


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """end -> the outputs of a real job that ended so; each was run as a job of a sweep and as a run by itself."""
    made = {}
    for end in ENDS:
        outputs = tmp_path_factory.mktemp(end) / "outputs"
        for sweep in (True, False):
            if end == "stopped":
                killed(outputs, sweep=sweep)
            else:
                words = ["precision.min_scale=1e6"] if end == "diverged" else []
                done = attempt(outputs, *words, sweep=sweep)
                assert done.code == 0, done.said
                assert done.status == ("completed" if end == "finished" else "diverged")
        made[end] = outputs
    return made


def in_a_fork(do, said: Path) -> Said:
    """What a command's function says, its exit code and what it took; 124 where it hangs."""
    with said.open("w") as out, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which a fork leaves behind
        process = os.fork()
        if not process:
            code = 70
            try:
                signal.alarm(LIMIT_S)
                for stream in (1, 2):
                    os.dup2(out.fileno(), stream)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", errors="backslashreplace") for n in (1, 2))
                code = do()
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status, used = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return Said(
        124 if code == -signal.SIGALRM else code, said.read_text(errors="replace"), used.ru_utime + used.ru_stime
    )


def asked_for(outputs: Path, end: str, *words: str):
    more = ["precision.min_scale=1e6"] if end == "diverged" else []
    return compose([*MLP, *WORDS, *more, f"paths.outputs={outputs}", *words])


def sweep(outputs: Path, end: str) -> int:
    """The -m command in one process: what its lead looks at, and its one job."""
    asked, cpu = asked_for(outputs, end), fingerprint(run_module.resolve(asked_for(outputs, end)).device)
    job = Job(["seed=0"], "seed=0", asked)
    answer = Answer(precision=asked.precision, device="cpu", fingerprint=cpu)
    print(*settle([job], [answer]), *what_differs([job]), sep="\n")
    view = View([job], [], console=rich.console.Console(file=sys.stdout, width=100))
    view.begin([])
    code = 0
    if job.status == "waiting":
        job.status, job.pid = "running", os.getpid()
        code = run_module.run(asked, sweep=True)
        view._table([job])
        told = folders.read_json(job.folder / "status.json")
        job.status, job.reason = told.get("status") or "failed", told.get("reason") or ""
        view.ended(job)
    view.summary()
    return code


def commands(outputs: Path, end: str) -> dict:
    single = next(outputs.glob("runs/*/*"))
    into = outputs.parent / "compared"
    return {
        "compare": lambda: module("compare.py").main([str(outputs), "--into", str(into)]),
        "resume": lambda: exit_code(lambda: run_module.run(asked_for(outputs, end, f"trainer.resume={single}"))),
        "same command": lambda: exit_code(lambda: run_module.run(asked_for(outputs, end))),
        "sweep": lambda: exit_code(lambda: sweep(outputs, end)),
        "replay": lambda: exit_code(lambda: module("replay.py").main([f"run={single}", "step=2"])),
    }


def what_is_wrong(
    name: str, end: str, real: dict, place: Path, seconds: list[float], limits: dict[str, float]
) -> list[str]:
    """Do the damage to a copy of both folders, run all commands on it, and say what was not as it should be.

    The CPU seconds of refusals go to `seconds`; `limits` of them are by command.
    """
    found = []
    for command in COMMANDS:
        outputs = place / command.replace(" ", "-") / "outputs"
        shutil.copytree(real[end], outputs, symlinks=True)
        for folder in (next(outputs.glob("runs/*/*")), next(outputs.glob("sweeps/night/*_s0_*"))):
            damage.damages()[name](folder)
        said = in_a_fork(commands(outputs, end)[command], place / "said")
        where = f"{end}, {name}, {command}: "
        fine = (0, 2, 3) if command == "replay" else (0, 2)
        if said.code not in fine and not (said.code == 1 and "cannot be written (" in said.text):
            found.append(f"{where}exit code {said.code}: {said.text[-700:]}")
        elif "Traceback" in said.text or re.search(r"^\w*(Error|Exception): ", said.text, re.M):
            found.append(f"{where}a traceback: {said.text[-700:]}")
        elif said.code == 2 and not said.text.lstrip().startswith("precision-lab: "):
            found.append(f"{where}refused without a sentence: {said.text[:300]}")
        elif said.code == 2 and said.cpu_s > limits.get(command, math.inf):
            found.append(f"{where}refused in {said.cpu_s:.1f} s: {said.text[:300]}")
        elif said.code == 2 and len(said.text) > 420:
            found.append(f"{where}refused at length: {said.text}")
        for log in outputs.rglob("train.log"):
            if log.is_file() and "Traceback" in log.read_text(errors="replace"):
                found.append(f"{where}a traceback in {log.name}: {log.read_text(errors='replace')[-700:]}")
        if command in ("resume", "same command", "sweep") and said.code == 0 and "left as they are" not in said.text:
            found += [f"{where}{one}" for one in ends_well(outputs, command)]
        if said.code == 2:
            seconds.append(said.cpu_s)
        shutil.rmtree(place / command.replace(" ", "-"))
    return found


def ends_well(outputs: Path, command: str) -> list[str]:
    """The newest folder of the command's kind holds a run that has ended, with all its log points."""
    places = outputs.glob("sweeps/night/*_s0_*") if command == "sweep" else outputs.glob("runs/*/*")
    newest = max(
        places, key=lambda path: (path / "result.json").lstat().st_mtime if (path / "result.json").exists() else 0
    )
    status = folders.read_json(newest / "status.json").get("status")
    if status == "completed":
        steps = [json.loads(line)["train/step"] for line in (newest / "metrics.jsonl").read_text().splitlines()]
        return [] if steps == LOG_POINTS else [f"log points {steps}"]
    return [] if status == "diverged" else [f"status {status}"]


@pytest.mark.parametrize("number", range(8))
def test_a_sample_of_damaged_folders(real, tmp_path, number):
    name = damage.chosen(8, seed=0)[number]
    assert what_is_wrong(name, ENDS[number % 3], real, tmp_path, [], {}) == []


@pytest.mark.slow
def test_every_damage_to_every_kind_of_folder_is_named_or_mended(real, tmp_path):
    found, seconds, names = [], [], list(damage.damages())
    for number, name in enumerate(names):
        found += what_is_wrong(name, ENDS[number % 3], real, tmp_path, seconds, REFUSAL_S)
    times = f"CPU seconds: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}"
    print(f"{len(names)} damages, {len(COMMANDS)} commands on each, {len(seconds)} refused; {times}")
    assert len(names) >= 100
    assert not found, "\n".join(found)
