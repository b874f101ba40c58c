"""A disk that takes no more: nothing written before is damaged, one sentence says so, the same command goes on.

The fast tests make the writes fail; the slow ones fill a small file system of their own.
"""

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from precision_lab import checkpoint, recorder
from precision_lab import run as run_module
from precision_lab.config import compose
from precision_lab.recorder import CannotWrite
from test_sweep import OWN, Sweep, command, sweep

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def whole(folder: Path) -> list[int]:
    """The steps in metrics.jsonl; fails if anything in a run's folder is damaged or half written."""
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("*.pt"):
        assert checkpoint.read(path)["trainer"]
    assert [path for path in folder.rglob(".*") if path.is_file()] == []
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["train/step"] for line in text.splitlines()]


# --- writes that fail --------------------------------------------------------------------------


def fails_from(file, call):
    """A stand-in for os.fsync that fails for a file of this name, from its n-th call on."""
    calls, fsync = [], os.fsync

    def stand_in(number):
        if file in os.readlink(f"/proc/self/fd/{number}"):
            calls.append(number)
            if len(calls) >= call:
                raise FULL
        fsync(number)

    return stand_in


def appends_fail_from(call):
    calls, append = [], recorder.append

    def stand_in(path, line):
        calls.append(line)
        if len(calls) >= call:
            raise CannotWrite(path, FULL)
        append(path, line)

    return stand_in


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc, to know a file by its descriptor")
@pytest.mark.parametrize(
    ("what", "stopped_at", "steps", "goes_on_after"),
    [
        ("step_", 8, [4], 4),  # the second checkpoint
        ("metrics.jsonl", 8, [4], 4),
        ("result.json", 12, [4, 8, 12], 12),
        ("status.json", 0, [], None),  # at the start: nothing is there to go on with
    ],
)
def test_a_run_stops_at_the_next_write_and_the_same_command_goes_on(
    monkeypatch, tmp_path, capsys, what, stopped_at, steps, goes_on_after
):
    words = ["model=mlp", "model.hidden=[16]", "dataset=digits", "trainer.steps=12", "trainer.batch_size=32"]
    words += ["precision=fp32", "probe.memory=false", "meter.warmup_steps=2", "device=cpu"]
    words += ["trainer.log_every=4", "trainer.checkpoint_every=4", "name=night", f"paths.outputs={tmp_path}"]
    asked = compose(words)

    def job():
        monkeypatch.setattr(run_module, "_a_job_ran", False)
        code = run_module.run(asked, sweep=True)
        (folder,) = tmp_path.glob("sweeps/night/*")
        return code, folder, capsys.readouterr()

    with monkeypatch.context() as broken:
        if what == "metrics.jsonl":
            broken.setattr(recorder, "append", appends_fail_from(2))
        else:
            broken.setattr(recorder.os, "fsync", fails_from(what, 2 if what == "step_" else 1))
        code, folder, told = job()
    assert code == 1
    assert told.out.count("cannot be written (No space left on device).") == 1
    assert "Traceback" not in told.out + told.err + (folder / "train.log").read_text()
    assert set(whole(folder)) >= set(steps)
    if what in ("step_", "metrics.jsonl"):
        status = json.loads((folder / "status.json").read_text())
        assert (status["status"], status["step"]) == ("interrupted", stopped_at)
        assert re.search(rf"{what}\S* cannot be written \(No space left on device\)\.$", status["reason"])
    code, _, told = job()
    assert code == 0, told
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"]) == ("completed", 12)
    assert result["resumed_at"] == ([goes_on_after] if goes_on_after else [])
    assert whole(folder) == [4, 8, 12]


# --- a file system of its own ------------------------------------------------------------------


class Disk:
    """A file system of some MiB, mounted where nobody else sees it; this process reaches it by /proc."""

    def __init__(self, place: Path, mib: int):
        place.mkdir()
        self.place = place
        try:
            words = ["unshare", "--map-root-user", "--mount", "sh"]
            self.shell = subprocess.Popen(words, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True)
            self.do(f"mount -t tmpfs -o size={mib}m none {place}")
            self.path = Path(f"/proc/{self.shell.pid}/root{place}")
            list(self.path.iterdir())
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")

    def do(self, line: str) -> None:
        try:
            self.shell.stdin.write(f"{line} && echo done || echo failed\n")
            self.shell.stdin.flush()
            said = self.shell.stdout.readline().strip()
        except BrokenPipeError as error:
            raise OSError("unshare is not allowed") from error
        if said != "done":
            raise OSError(said or "unshare is not allowed")


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "disk", mib=80)
    yield made
    made.shell.kill()
    made.shell.communicate()


SPOILED = [*OWN, "model._target_=jobs.Spoiler", "precision=fp32"]


def stopped(done: Sweep, reason: str) -> Path:
    """What is said of a sweep's only job, which could write no more."""
    (folder,) = done.jobs.values()
    assert done.code == 1, done.out + done.err
    assert done.err == ""
    assert "Traceback" not in done.out + (folder / "train.log").read_text()
    (line,) = [line for line in done.out.splitlines() if line.startswith("[1/1]")]
    assert f": failed ({reason}" in line
    assert re.search(r"^\S.* failed ", done.out, re.MULTILINE)  # the table's row
    assert "1 of 1 jobs are left; the same command runs them." in done.out
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "step", "words", "kept", "goes_on_after"),
    [
        ("checkpoint", 6, {"steps": 12, "log_every": 2, "checkpoint_every": 4}, [2, 4, 6], 4),
        ("metrics", 27, {"steps": 60, "log_every": 1, "checkpoint_every": 25}, [*range(1, 27)], 25),
        ("result", 9, {"steps": 8, "log_every": 2, "checkpoint_every": 4}, [2, 4, 6, 8], 8),  # step 9: of the probe
    ],
)
def test_a_full_disk_damages_nothing_and_with_room_the_run_goes_on(
    tmp_path, disk, at, step, words, kept, goes_on_after
):
    order, filler = tmp_path / "order", disk.path / "filler"
    order.write_text(f"fill {filler}")
    asked = [*SPOILED, f"+model.order={order}", f"+model.step={step}", "probe.memory=true"]
    asked += [f"trainer.{key}={value}" for key, value in words.items()]
    folder = stopped(sweep(disk.path, *asked), "its folder cannot be written (No space left on device)")
    assert not order.exists()
    there = whole(folder)
    assert there[: len(kept)] == kept
    assert len(there) < words["steps"] / words["log_every"] or at == "result"
    assert not (folder / "result.json").exists()
    again = sweep(disk.path, *asked)
    assert again.code == 2, again.out  # still full
    assert re.search(r"outputs has 0\.0 MiB of free space, and 1 job to run wants at least 64 MiB", again.err)
    filler.unlink()
    assert sweep(disk.path, *asked).code == 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"], result["resumed_at"]) == ("completed", words["steps"], [goes_on_after])
    assert whole(folder) == [*range(words["log_every"], words["steps"] + 1, words["log_every"])]


@pytest.mark.slow
@pytest.mark.parametrize("multirun", [True, False])
def test_a_read_only_disk_is_one_sentence(tmp_path, disk, multirun):
    words = [*SPOILED, f"+model.order={tmp_path}/none", "+model.step=1"]
    asked = command(disk.path, *(["-m"] if multirun else []), *words)
    disk.do(f"mount -o remount,ro {disk.place}")
    done = subprocess.run(**asked, capture_output=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"precision-lab: .*\(Read-only file system\); set paths\.outputs\.\n", done.stderr)


@pytest.mark.slow
def test_a_single_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path, disk):
    order, filler = tmp_path / "order", disk.path / "filler"
    order.write_text(f"fill {filler}")
    words = [*SPOILED, f"+model.order={order}", "+model.step=6", "trainer.steps=12", "trainer.checkpoint_every=4"]
    asked = command(disk.path, *words)
    with (disk.path / "said").open("w") as said:
        done = subprocess.run(**asked, stdout=said, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    (folder,) = disk.path.glob("outputs/runs/*/*")
    assert whole(folder) == [2, 4, 6, 8]  # the last line had room where the one before had ended
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    filler.unlink()
    done = subprocess.run(**asked, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert whole(folder) == [2, 4, 6, 8, 10, 12]
    assert [*disk.path.glob("outputs/runs/*/*")] == [folder]


@pytest.mark.slow
def test_a_folder_that_is_removed_in_training_ends_the_run_and_is_not_made_again(tmp_path):
    order, remove = tmp_path / "order", tmp_path / "remove"
    remove.write_text(f"#!/bin/sh\nrm -r {tmp_path}/outputs/sweeps/unnamed/*_fp32_*\n")
    remove.chmod(0o755)
    order.write_text(f"run {remove}")
    done = sweep(tmp_path, *SPOILED, f"+model.order={order}", "+model.step=3", "seed=0,1")
    assert done.code == 1, done.out + done.err
    assert done.err == ""
    assert "Traceback" not in done.out
    assert ": failed (its folder is gone)" in done.out
    assert "1 of 2 jobs are left; the same command runs them." in done.out
    ((name, folder),) = done.jobs.items()  # the other job's, whole
    assert "_s1_" in name
    assert whole(folder) == [2, 4, 6]
    again = sweep(tmp_path, *SPOILED, f"+model.order={order}", "+model.step=3", "seed=0,1")
    assert again.code == 0, again.out + again.err
    assert len(again.jobs) == 2
    assert "1 of 2 jobs had been run before" in again.out
