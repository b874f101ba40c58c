"""Where runs lie: a job's folder is named by content, held by one process at a time, and never loses a file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from precision_lab import config, folders, hardware
from precision_lab.config import ROOT, Rerun
from precision_lab.errors import InputError
from precision_lab.folders import (
    Busy,
    Claim,
    claim,
    claim_single,
    finished,
    job_folder,
    read_json,
    set_aside,
    sweep_folder,
)

OWN = ("model=custom", "model._target_=mine.Net")  # which may take anything
HERE = {"device": "cuda", "model": "NVIDIA X", "count": 1}
STATUSES = ("running", "completed", "diverged", "out_of_memory", "failed", "interrupted")

# Claims the folder and holds it. A second argument: a fork of it lives on, as a data worker may.
HOLDER = """
import json, os, sys, time
from pathlib import Path
from precision_lab import folders
from precision_lab.config import Rerun

folder = Path(sys.argv[1])
log = folders.claim(folder, Rerun.never, {}).log
folders.set_aside(folder)
(folder / "status.json").write_text(json.dumps({"status": "running", "pid": os.getpid()}))
print("of the first attempt", file=log, flush=True)
other = os.fork() if sys.argv[2:] else 0
if other or not sys.argv[2:]:
    print(other, flush=True)
time.sleep(60)
"""


@cache
def composed(*overrides):
    return config.compose(list(overrides))


def asked(tmp_path, *overrides, **more):
    base = composed(*overrides)
    return replace(base, paths=replace(base.paths, outputs=str(tmp_path)), **more)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, values in files.items():
        text = values if isinstance(values, str) else json.dumps(values)
        (folder / f"{stem}.json").write_text(text)


def attempt(folder, rerun=Rerun.all, fingerprint=HERE):
    """Claim the folder, set aside what is there unless it is finished, and let go of it."""
    claimed = claim(folder, rerun, fingerprint)
    if claimed.log:
        set_aside(folder)
        claimed.log.close()
    return None if claimed.log else claimed.status


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """The logs that were opened; closed after the test."""
    logs, open_log = [], folders.open_log
    monkeypatch.setattr(folders, "open_log", lambda *words: logs.append(open_log(*words)) or logs[-1])
    yield logs
    for log in logs:
        log.close()


@pytest.fixture
def held():
    """Starts a process that holds a folder; returns it and the pid of its fork."""
    started, forks = [], []

    def hold(folder, *more):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER, folder, *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        started.append(process)
        fork = int(process.stdout.readline())
        forks.extend([fork] if fork else [])
        return process, fork

    yield hold
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


# --- by content ------------------------------------------------------------------------------


def test_the_name_decides_the_parent_and_nothing_below_it(tmp_path):
    one, two = (job_folder(asked(tmp_path, name=name), "cpu") for name in ("a", "b"))
    assert (one.parent, two.parent) == (tmp_path / "sweeps" / "a", tmp_path / "sweeps" / "b")
    assert one.name == two.name


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("my net", "my-net"),
        ("a/../b", "a-..-b"),
        ("..", "unnamed"),
        ("///", "unnamed"),
        (None, "unnamed"),
        ("ü", "ü"),
        ("x" * 200, "x" * 80),
    ],
)
def test_a_name_of_any_kind_is_one_folder_under_sweeps(tmp_path, name, folder):
    assert sweep_folder(asked(tmp_path, name=name)) == tmp_path / "sweeps" / folder


def test_what_is_part_of_a_run_gives_it_a_folder_of_its_own(tmp_path):
    plain = job_folder(asked(tmp_path), "cpu")
    for change in ("seed=1", "precision=bf16", "trainer.steps=7", "model.hidden=[16]", "optimizer.lr=0.1"):
        other = job_folder(asked(tmp_path, change), "cpu")
        assert (other.parent, other != plain) == (plain.parent, True), change
    assert job_folder(asked(tmp_path), "cuda") != plain


def test_what_is_no_part_of_a_run_does_not(tmp_path):
    plain = job_folder(asked(tmp_path), "cpu")
    for change in ("trainer.workers=1", "tags=[x]", "rerun=all", "on_error=stop", "wandb.mode=disabled", "check=true"):
        assert job_folder(asked(tmp_path, change), "cpu") == plain, change


def test_a_folder_is_not_made_by_naming_it(tmp_path):
    job_folder(asked(tmp_path), "cpu")
    assert not list(tmp_path.iterdir())


def test_a_single_run_s_folder_is_made_new_each_time(tmp_path):
    one, two = (claim_single(asked(tmp_path), "cpu").folder for _ in range(2))
    assert one != two
    for folder in (one, two):
        assert folder.is_dir()
        assert folder.parent.parent == tmp_path / "runs"
        assert folder.name.endswith(job_folder(asked(tmp_path), "cpu").name)


# --- finished --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("rerun", Rerun)
def test_which_jobs_are_finished(tmp_path, status, rerun):
    results = ("completed", "diverged", "out_of_memory")
    left_alone = {"never": (*results, "failed"), "failed": results, "all": ()}[rerun.name]
    write(tmp_path, status={"status": status}, result={"fingerprint": HERE})
    assert finished(tmp_path, rerun, HERE) == (status if status in left_alone else None)


@pytest.mark.parametrize("text", ["", "{", '{"status": "compl', "[]", '"completed"', "null", "\0" * 40])
def test_a_damaged_status_counts_as_none(tmp_path, text):
    write(tmp_path, status=text, result={"fingerprint": HERE})
    assert finished(tmp_path, Rerun.never, HERE) is None
    assert attempt(tmp_path, Rerun.never) is None
    assert (tmp_path / "attempts" / "1" / "status.json").read_text() == text


def test_no_bytes_at_all_count_as_none(tmp_path):
    assert finished(tmp_path / "nowhere", Rerun.never, HERE) is None
    (tmp_path / "status.json").write_bytes(b"\xff\xfe{}")  # no UTF-8
    assert read_json(tmp_path / "status.json") == {}
    (tmp_path / "folder.json").mkdir()
    assert read_json(tmp_path / "folder.json") == {}


def test_a_result_of_other_hardware_is_refused_and_the_difference_named(tmp_path):
    there = {"device": "cuda", "model": "NVIDIA Y", "count": 1, "driver": "5"}
    write(tmp_path, status={"status": "completed"}, result={"fingerprint": there})
    with pytest.raises(InputError) as caught:
        finished(tmp_path, Rerun.never, HERE)
    message = str(caught.value)
    assert "(model NVIDIA Y, here NVIDIA X, driver 5, here missing)" in message
    assert str(tmp_path) in message
    assert not {"device", "count"} & set(message.partition("(")[2].partition(")")[0].split())
    assert all(way in message for way in ("name", "paths.outputs", "rerun=all"))
    with pytest.raises(InputError):
        claim(tmp_path, Rerun.never, HERE)
    assert set(contents(tmp_path)) == {"status.json", "result.json", "train.log"}  # left as it was


def test_other_hardware_is_no_matter_where_the_job_runs_anyway(tmp_path):
    write(tmp_path, status={"status": "failed"}, result={"fingerprint": {"model": "other"}})
    assert finished(tmp_path, Rerun.failed, HERE) is None
    assert finished(tmp_path, Rerun.all, HERE) is None


def test_a_fingerprint_comes_back_from_its_file_as_it_was(tmp_path):
    """Else no job would ever be finished."""
    fingerprint = hardware.fingerprint(torch.device("cpu"))
    write(tmp_path, status={"status": "completed"}, result={"fingerprint": fingerprint})
    assert finished(tmp_path, Rerun.never, fingerprint) == "completed"


# --- claimed ---------------------------------------------------------------------------------


def test_a_claim_makes_the_folder_and_gives_its_open_log(tmp_path):
    folder = tmp_path / "sweeps" / "x" / "job"
    claimed = claim(folder, Rerun.never, HERE)
    with claimed.log as log:
        assert (claimed.folder, claimed.status) == (folder, None)
        log.write("ü \udcff\n")  # whatever the job prints
    assert contents(folder) == {"train.log": "ü \\udcff\n"}


def test_a_finished_job_is_left_as_it_is(tmp_path):
    write(tmp_path, status={"status": "diverged"}, result={"fingerprint": HERE})
    (tmp_path / "train.log").write_text("before\n")
    left = contents(tmp_path)
    assert claim(tmp_path, Rerun.never, HERE) == Claim(tmp_path, None, "diverged")
    assert contents(tmp_path) == left


@pytest.mark.parametrize("status", ["completed", "failed"])
@pytest.mark.parametrize("rerun", [Rerun.failed, Rerun.all])
def test_what_another_sweep_has_finished_since_it_was_asked_for_is_not_run_again(tmp_path, status, rerun):
    write(tmp_path, status={"status": status, "updated": 100.0}, result={"fingerprint": HERE})
    assert claim(tmp_path, rerun, HERE, asked_at=99.0) == Claim(tmp_path, None, status)
    again = claim(tmp_path, rerun, HERE, asked_at=101.0)
    assert (again.log is None) == (status == "completed" and rerun is Rerun.failed)


def test_what_was_killed_since_it_was_asked_for_is_run(tmp_path):
    write(tmp_path, status={"status": "running", "updated": 100.0})
    assert claim(tmp_path, Rerun.all, HERE, asked_at=99.0).stopped


def test_what_another_process_runs_is_busy_until_it_is_killed(tmp_path, held):
    process, _ = held(tmp_path)
    for rerun in Rerun:
        with pytest.raises(Busy):
            claim(tmp_path, rerun, HERE)
    assert set(contents(tmp_path)) == {"status.json", "train.log"}  # nothing of its was moved
    process.kill()
    process.wait()
    assert read_json(tmp_path / "status.json")["status"] == "running"
    assert attempt(tmp_path, Rerun.never) is None
    assert read_json(tmp_path / "attempts" / "1" / "status.json")["pid"] == process.pid
    assert (tmp_path / "train.log").read_text() == "of the first attempt\n"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"status": "running", "pid": 7, "host": "node3", "started": time.time()}, r"pid 7 on node3 since \d\d:\d\d"),
        (
            {"status": "running", "pid": 7, "host": "node3", "started": 0.0},
            r"pid 7 on node3 since 19\d\d-\d\d-\d\d \d\d:\d\d",
        ),
        ({"status": "interrupted", "pid": 7, "host": "node3", "started": 0.0}, "another process"),  # an earlier one's
        ({"status": "running", "started": "at noon"}, "another process"),
        ({"status": "running", "started": 1e300}, "another process"),
        ([], "another process"),
    ],
)
def test_who_holds_a_job_is_named_as_far_as_its_folder_says(tmp_path, held, status, words):
    held(tmp_path)
    write(tmp_path, status=status)
    with pytest.raises(Busy) as busy:
        claim(tmp_path, Rerun.never, HERE)
    assert re.fullmatch(words, str(busy.value))


def test_a_claim_that_is_refused_leaves_nothing_open(tmp_path, held, opened):
    write(tmp_path / "there", status={"status": "completed"}, result={"fingerprint": {"model": "other"}})
    held(tmp_path / "busy")
    for folder, error in (("there", InputError), ("busy", Busy)):
        with pytest.raises(error):
            claim(tmp_path / folder, Rerun.never, HERE)
    assert [log.closed for log in opened] == [True, True]


def test_a_data_worker_that_outlives_its_run_holds_nothing(tmp_path, held):
    process, worker = held(tmp_path, "fork")
    process.kill()
    process.wait()
    os.kill(worker, 0)  # lives, or this raises
    assert attempt(tmp_path, Rerun.never) is None


def test_whether_a_folder_is_held_is_told_and_changes_nothing(tmp_path, held):
    assert not folders.held(tmp_path / "none")
    process, _ = held(tmp_path / "job")
    before = contents(tmp_path)
    for _ in range(2):
        assert folders.held(tmp_path / "job")
    with pytest.raises(Busy):
        claim(tmp_path / "job", Rerun.all, HERE)
    assert contents(tmp_path) == before
    process.kill()
    process.wait()
    assert not folders.held(tmp_path / "job")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_log_that_is_no_file_is_held_by_nobody(tmp_path, make):
    make(tmp_path / "train.log")
    assert not folders.held(tmp_path)


def test_a_finished_job_can_be_claimed_again_after_it_was_looked_at(tmp_path):
    write(tmp_path, status={"status": "completed"}, result={"fingerprint": HERE})
    assert claim(tmp_path, Rerun.never, HERE) == Claim(tmp_path, None, "completed")
    process = subprocess.run(
        [sys.executable, "-P", "-c", HOLDER.replace("sleep(60)", "sleep(0)").replace("never", "all"), tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
    )
    assert process.returncode == 0


# --- set aside -------------------------------------------------------------------------------


def test_each_attempt_is_kept_and_the_log_continued(tmp_path):
    for number in (1, 2, 3):
        with claim(tmp_path, Rerun.all, HERE).log as log:
            set_aside(tmp_path)
            log.write(f"line {number}\n")
        (tmp_path / "metrics.jsonl").write_text(f"metrics {number}")
        (tmp_path / ".status.json.77").write_text(f"half {number}")  # a writer was killed
        write(tmp_path / "checkpoints", weights={"of": number})
        write(tmp_path, status={"status": "completed", "n": number})
    kept = {
        ".status.json.77": "half {}",
        "metrics.jsonl": "metrics {}",
        "checkpoints/weights.json": '{{"of": {}}}',
        "status.json": '{{"status": "completed", "n": {}}}',
    }
    expected = {"train.log": "line 1\nline 2\nline 3\n"}
    for number, place in ((1, "attempts/1/"), (2, "attempts/2/"), (3, "")):
        expected |= {place + name: text.format(number) for name, text in kept.items()}
    assert contents(tmp_path) == expected


def test_an_attempt_that_left_only_a_log_is_no_attempt(tmp_path):
    attempt(tmp_path)
    attempt(tmp_path)
    assert set(os.listdir(tmp_path)) == {"train.log"}


def test_an_attempt_that_the_user_has_deleted_is_in_nobody_s_way(tmp_path):
    for number in (1, 2):
        write(tmp_path, status={"status": "completed", "n": number})
        attempt(tmp_path)
    for path in (tmp_path / "attempts" / "1").iterdir():
        path.unlink()
    (tmp_path / "attempts" / "1").rmdir()
    write(tmp_path, status={"status": "completed", "n": 3})
    attempt(tmp_path)
    kept = {read_json(path)["n"] for path in (tmp_path / "attempts").glob("*/status.json")}
    assert kept == {2, 3}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_claim_that_is_killed_half_way_leaves_no_finished_job_without_its_result(
    tmp_path, monkeypatch, backwards, moved
):
    write(tmp_path, environment={}, result={"fingerprint": HERE}, status={"status": "completed"})
    entries, rename, done = Path.iterdir, Path.rename, []

    def killed_after(path, target):
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    # the order in which a file system lists its files is its own
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(entries(path), reverse=backwards)))
    monkeypatch.setattr(Path, "rename", killed_after)
    try:
        attempt(tmp_path)
    except KeyboardInterrupt:
        assert moved < 3
    assert finished(tmp_path, Rerun.never, HERE) is None or (tmp_path / "result.json").exists()
    monkeypatch.setattr(Path, "rename", rename)
    attempt(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("attempts/*/*")) == [
        *("environment.json", "result.json", "status.json")
    ]


# --- not to be made --------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", ["sweeps", "sweeps/x", "sweeps/x/job", "sweeps/x/job/train.log"])
def test_a_job_s_folder_that_cannot_be_made_is_wrong_input(tmp_path, blocked):
    way = tmp_path / blocked
    way.parent.mkdir(parents=True, exist_ok=True)
    way.mkdir() if blocked.endswith(".log") else way.touch()
    with pytest.raises(InputError, match=r"sweeps/x/job cannot be made \(.+\); set paths\.outputs\.$"):
        claim(tmp_path / "sweeps" / "x" / "job", Rerun.never, HERE)


def test_a_single_run_s_folder_that_cannot_be_made_is_wrong_input(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(InputError, match=r"cannot be made \(Not a directory\); set paths\.outputs\.$"):
        claim_single(asked(tmp_path), "cpu")


def test_the_log_has_one_name(tmp_path):
    with folders.open_log(tmp_path) as log:
        assert Path(log.name) == tmp_path / folders.LOG == tmp_path / "train.log"


@pytest.mark.parametrize("files", [{}, {"result": ""}, {"result": '{"summary": '}])
def test_a_finished_job_whose_result_is_lost_is_missing(tmp_path, files):
    write(tmp_path, status={"status": "completed"}, **files)
    assert finished(tmp_path, Rerun.never, HERE) is None


def test_a_status_that_is_no_text_is_none(tmp_path):
    write(tmp_path, status={"status": ["completed"]}, result={"fingerprint": HERE})
    assert finished(tmp_path, Rerun.never, HERE) is None


def test_a_secret_of_the_config_is_no_part_of_a_sweeps_folder(tmp_path):
    asked = config.compose(
        ["name=run-correct-horse", *OWN, "+model.api_key=correct-horse", f"paths.outputs={tmp_path}"]
    )
    assert sweep_folder(asked) == tmp_path / "sweeps" / "run--redacted"
