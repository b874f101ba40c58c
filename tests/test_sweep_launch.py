"""The processes of a sweep: what becomes of a job whatever its process does, and of all when the sweep is stopped.

The jobs are small scripts that do what their first tag says; a few go through the job's real `main`, with a
stand-in for the run.
"""

import errno
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from precision_lab import config
from precision_lab.config import ROOT, OnError, Rerun
from precision_lab.sweep import launch
from precision_lab.sweep.launch import places_for, run_jobs
from precision_lab.sweep.plan import Job
from precision_lab.sweep.view import View
from precision_lab.terminal import BUSY, CHECKED

FAKE = """
import json, os, pickle, signal, sys, time
from pathlib import Path

order = pickle.load(open(0, "rb", closefd=False))
here = Path(order.asked.paths.outputs)

def status(word, reason="", **more):
    values = {"status": word, "reason": reason, "pid": os.getpid(), "updated": time.time(), **more}
    (here / "status.json").write_text(json.dumps(values))

def wait_for(path):
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    sys.exit(f"{path.name} did not come")

exec(order.asked.tags[0])
"""
REAL = """
import sys, types

def run(asked, sweep, asked_at):
    exec(asked.tags[0], {**globals(), "asked": asked})
    return 0

sys.modules["precision_lab.run"] = types.ModuleType("run")
sys.modules["precision_lab.run"].run = run
from precision_lab.sweep.child import main; main()
"""
LEAD = """
import io, json, pickle, sys
from rich.console import Console
from precision_lab.sweep import launch
from precision_lab.sweep.view import View
from precision_lab.terminal import CHECKED

launch.POLL_S = 0.01
jobs, child = pickle.load(open(sys.argv[1], "rb"))
code = launch.run_jobs(jobs, [{}], View(jobs, [], console=Console(file=io.StringIO())), child)
print(json.dumps([[job.status, job.reason] for job in jobs]))
sys.exit(code)
"""
# Takes the log's lock as a run does, and says so where it cannot.
LOCKS = f"""
import fcntl
(here / "tries").open("a").write("x")
log = (here / "train.log").open("a")
try:
    fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("fp32: mlp{BUSY}pid 7 on node3 since 14:02 -> /x")
    sys.exit(0)
status("completed")
"""
HOLDER = """
import fcntl, sys, time
log = open(sys.argv[1] + "/train.log", "a")
fcntl.lockf(log, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""
HERE = {"device": "cpu"}
COMPLETED = "status('completed')"
# writes down the signal that comes first, and ends as a run does
STOPPABLE = """
def end(number, frame):
    (here / "signal").write_text(signal.Signals(number).name)
    status("interrupted")
    sys.exit(130 if number == signal.SIGINT else 143)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, end)
status("running")
(here / "ready").touch()
time.sleep(30)
"""
DEAF = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
status("running")
(here / "ready").touch()
time.sleep(30)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(launch, "LOOK_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@cache
def composed():
    return config.compose(["precision=fp32", "model=custom", "model._target_=mine.Net"])  # which may take anything


def job(folder, code=COMPLETED, overrides=(), **more):
    paths = replace(composed().paths, outputs=str(folder))
    asked = replace(composed(), tags=[textwrap.dedent(code)], paths=paths, **more)
    return Job(list(overrides), folder.name, asked, folder)


def jobs_of(tmp_path, *codes, **more):
    return [job(tmp_path / f"job{number}", code, **more) for number, code in enumerate(codes)]


def run_all(jobs, places=1, child=FAKE, out=None):
    places = [{}] * places if isinstance(places, int) else places
    child = [sys.executable, "-c", child] if isinstance(child, str) else child
    return run_jobs(jobs, places, View(jobs, [], console=Console(file=out or io.StringIO(), width=200)), child)


def stands(jobs):
    return [(one.status, one.reason) for one in jobs]


def write_status(folder, status, **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"status": status, "pid": 1, "updated": time.time() + 99, **more}))


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def when(path, action):
    """Do something as soon as a file is there."""

    def watch():
        wait_until(path.exists)
        action()

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture
def lead(tmp_path):
    """Starts a sweep in a process of its own."""
    started = []

    def start(jobs):
        path = tmp_path / "jobs.pickle"
        path.write_bytes(pickle.dumps((jobs, [sys.executable, "-c", FAKE])))
        started.append(subprocess.Popen([sys.executable, "-c", LEAD, path], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def held():
    """Starts a process that holds a job's folder; returns a function that makes it let go."""
    started = []

    def hold(folder):
        folder.mkdir(exist_ok=True)
        started.append(subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1].kill

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def write_end(folder, status, fingerprint=HERE, **more):
    write_status(folder, status, **more)
    (folder / "result.json").write_text(json.dumps({"fingerprint": fingerprint}))


# --- statuses and exit codes -----------------------------------------------------------------


def test_jobs_run_one_after_the_other_and_stand_as_they_wrote(tmp_path):
    code = """
    trace = (here.parent / "trace").open("a")
    print("begin", here.name, file=trace, flush=True)
    status("{}", reason="{}")
    print("end", here.name, file=trace, flush=True)
    """
    words = [("completed", ""), ("diverged", "loss is nan"), ("out_of_memory", "too large")]
    jobs = jobs_of(tmp_path, *(code.format(*word) for word in words))
    assert run_all(jobs) == 0
    assert stands(jobs) == words
    assert all(one.seconds > 0 and not one.before for one in jobs)
    trace = [f"{word} job{number}" for number in range(3) for word in ("begin", "end")]
    assert (tmp_path / "trace").read_text().splitlines() == trace


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("completed", "diverged", "out_of_memory", "unsupported", "same", "checked"), 0),
        (("unsupported", "unsupported"), 0),
        (("completed", "failed"), 1),
        (("completed", "interrupted"), 1),
        (("completed", "not run"), 1),
    ],
)
def test_the_exit_code_tells_whether_every_job_has_a_result(tmp_path, statuses, code):
    """And a job that does not wait is not run."""
    jobs = jobs_of(tmp_path, *statuses)
    for one, status in zip(jobs, statuses, strict=True):
        one.status = status
    assert run_all(jobs, child=["/no/such/program"]) == code
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_error", OnError)
def test_after_a_failure_the_sweep_goes_on_or_stops_as_asked(tmp_path, on_error):
    failed = "status('failed', 'ValueError: no'); sys.exit(1)"
    jobs = jobs_of(tmp_path, COMPLETED, failed, COMPLETED, on_error=on_error)
    out = io.StringIO()
    assert run_all(jobs, out=out) == 1
    last = {
        "continue": ("completed", ""),
        "stop": ("not run", "an earlier job failed, and on_error=stop"),
    }[on_error.name]
    assert stands(jobs) == [("completed", ""), ("failed", "ValueError: no"), last]
    assert (tmp_path / "job2").exists() is (last[0] == "completed")
    assert f"job1: failed (ValueError: no; see {tmp_path}/job1/train.log)" in out.getvalue()


def test_a_job_that_diverged_stops_nothing(tmp_path):
    jobs = jobs_of(tmp_path, "status('diverged')", COMPLETED, on_error=OnError.stop)
    assert run_all(jobs) == 0
    assert [one.status for one in jobs] == ["diverged", "completed"]


def test_a_failure_leaves_the_one_beside_it_running(tmp_path):
    codes = (
        "wait_for(here.parent / 'job1' / 'status.json'); sys.exit('no')",
        "status('running'); time.sleep(0.3); status('completed')",
        COMPLETED,
    )
    jobs = jobs_of(tmp_path, *codes, on_error=OnError.stop)
    assert run_all(jobs, places=2) == 1
    assert [one.status for one in jobs] == ["failed", "completed", "not run"]


# --- how a process may end -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("print('one'); print('precision-lab: it is wrong\\n'); sys.exit(2)", "failed", "it is wrong"),
        ("raise ValueError('two words')", "failed", "ValueError: two words"),
        ("sys.exit(3)", "failed", "exit code 3"),
        ("pass", "failed", "ended with exit code 0 "),  # as fine as it may look, there is no result
        ("status('running')", "failed", "ended with exit code 0 "),
        ("status('running'); print('a word'); os._exit(5)", "failed", ""),  # what was in its buffer is lost
        ("(here / 'status.json').write_text('{')", "failed", "ended with exit code 0 "),
        (
            *("status('running'); os.kill(os.getpid(), signal.SIGKILL)", "failed"),
            "killed by SIGKILL, perhaps for want of memory",
        ),
        ("status('running'); os.kill(os.getpid(), signal.SIGSEGV)", "failed", "killed by SIGSEGV"),
        ("os.kill(os.getpid(), getattr(signal, 'SIGRTMIN', 3) + 3)", "failed", "killed by "),  # one without a name
        ("status('running'); os.kill(os.getpid(), signal.SIGTERM)", "interrupted", ""),
        ("status('interrupted', 'SIGTERM'); sys.exit(143)", "interrupted", "SIGTERM"),
        ("sys.exit(130)", "interrupted", ""),  # before it had a folder
        ("status('completed'); os.kill(os.getpid(), signal.SIGKILL)", "completed", ""),  # while it tidied up
    ],
)
def test_whatever_a_process_does_its_job_has_a_status(tmp_path, code, status, reason):
    jobs = jobs_of(tmp_path, code)
    assert run_all(jobs) == (0 if status == "completed" else 1)
    assert jobs[0].status == status
    assert jobs[0].reason.startswith(reason)
    assert bool(jobs[0].reason) is (status == "failed" or bool(reason))


def test_the_reason_is_no_line_of_an_earlier_attempt(tmp_path):
    jobs = jobs_of(tmp_path, "sys.exit(3)")
    jobs[0].folder.mkdir()
    (jobs[0].folder / "train.log").write_text("step 400, completed\n")
    run_all(jobs)
    assert stands(jobs) == [("failed", "exit code 3")]


def test_what_a_job_prints_goes_to_the_end_of_its_log(tmp_path):
    jobs = jobs_of(tmp_path, "print('out', flush=True); print('err', file=sys.stderr); status('completed')")
    jobs[0].folder.mkdir()
    (jobs[0].folder / "train.log").write_text("before\n")
    run_all(jobs)
    assert (jobs[0].folder / "train.log").read_text() == "before\nout\nerr\n"


def test_what_another_process_did_is_left_as_it_is(tmp_path):
    jobs = jobs_of(tmp_path, "pass")  # its process found the folder finished
    write_status(jobs[0].folder, "completed", reason="theirs")
    assert run_all(jobs) == 0
    assert (jobs[0].status, jobs[0].reason, jobs[0].before) == ("completed", "theirs", True)


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_without_a_word_a_job_that_nobody_runs_has_failed(tmp_path, status):
    jobs = jobs_of(tmp_path, "pass")
    write_status(jobs[0].folder, status)
    assert run_all(jobs) == 1
    assert stands(jobs) == [("failed", "ended with exit code 0 and without a result")]


# --- run elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("rerun", Rerun)
@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("diverged", 0), ("failed", 1)])
def test_what_another_process_brings_to_its_end_is_not_run_again(tmp_path, held, status, code, rerun):
    jobs = jobs_of(tmp_path, LOCKS, COMPLETED, rerun=rerun)
    jobs[0].fingerprint = HERE
    let_go = held(jobs[0].folder)

    def end():
        wait_until(lambda: (jobs[0].status, jobs[1].status) == ("elsewhere", "completed"))  # the others go on
        write_status(jobs[0].folder, "running")
        time.sleep(0.1)  # looked at several times
        assert jobs[0].status == "elsewhere"
        write_end(jobs[0].folder, status, reason="theirs")
        let_go()

    when(jobs[0].folder / "tries", end)
    out = io.StringIO()
    assert run_all(jobs, out=out) == code
    assert (jobs[0].status, jobs[0].reason, jobs[0].before) == (status, "theirs", True)
    assert (jobs[0].folder / "tries").read_text() == "x"
    assert out.getvalue().count("waiting for 1 job that is run elsewhere (pid 7 on node3 since 14:02)\n") == 1
    assert re.findall(r"^\[\d/2\] job\d", out.getvalue(), re.MULTILINE) == ["[1/2] job1", "[2/2] job0"]


@pytest.mark.parametrize("left", [None, "running", "interrupted", "failed"])
def test_what_another_process_leaves_without_an_end_is_run(tmp_path, held, left):
    """An end that was there before, and is to be run again, is none; the folder may even be gone."""
    jobs = jobs_of(tmp_path, COMPLETED, LOCKS, rerun=Rerun.failed)
    jobs[1].fingerprint = HERE
    let_go = held(jobs[1].folder)
    if left:
        write_end(jobs[1].folder, left)
    when(jobs[1].folder / "tries", lambda: (wait_until(lambda: jobs[1].status == "elsewhere"), let_go()))
    assert run_all(jobs) == 0
    assert [(one.status, one.before) for one in jobs] == [("completed", False)] * 2
    assert (jobs[1].folder / "tries").read_text() == "xx"


def test_an_end_on_other_hardware_is_for_the_job_s_own_process_to_judge(tmp_path, held):
    jobs = jobs_of(tmp_path, LOCKS)
    jobs[0].fingerprint = HERE
    let_go = held(jobs[0].folder)

    def end():
        wait_until(lambda: jobs[0].status == "elsewhere")
        write_end(jobs[0].folder, "completed", {"device": "cuda"})
        let_go()

    when(jobs[0].folder / "tries", end)
    assert run_all(jobs) == 0
    assert (jobs[0].folder / "tries").read_text() == "xx"


def test_a_signal_ends_the_waiting(tmp_path, held):
    jobs = jobs_of(tmp_path, LOCKS, "pass")  # the second one's word is lost, as on a full disk
    for one in jobs:
        held(one.folder)
    write_status(jobs[1].folder, "running", host="node3", started=time.time())

    def stop():
        wait_until(lambda: [one.status for one in jobs] == ["elsewhere"] * 2)
        os.kill(os.getpid(), signal.SIGTERM)

    when(jobs[0].folder / "tries", stop)
    assert run_all(jobs) == 143
    assert stands(jobs)[0] == ("not run", "left to pid 7 on node3 since 14:02")
    assert jobs[1].status == "not run"
    assert re.fullmatch(r"left to pid 1 on node3 since \d\d:\d\d", jobs[1].reason)


@pytest.mark.parametrize("first", ["elsewhere", "failed"])
def test_with_on_error_stop_nothing_is_waited_for_after_a_failure(tmp_path, held, first):
    go = "wait_for(here.parent / 'go')\n"
    codes = (LOCKS, go + "sys.exit('no')") if first == "elsewhere" else (go + LOCKS, "sys.exit('no')")
    jobs = jobs_of(tmp_path, *codes, on_error=OnError.stop)
    held(jobs[0].folder)

    def second():
        wait_until(lambda: first in [one.status for one in jobs])
        (tmp_path / "go").touch()

    when(jobs[1].folder, second)
    assert run_all(jobs, places=2) == 1
    assert stands(jobs) == [("not run", "left to pid 7 on node3 since 14:02"), ("failed", "no")]


def test_a_failure_elsewhere_stops_as_one_here_does(tmp_path, held):
    jobs = jobs_of(tmp_path, LOCKS, "wait_for(here.parent / 'go'); status('completed')", LOCKS, on_error=OnError.stop)
    jobs[0].fingerprint = HERE
    let_go = held(jobs[0].folder)

    def end():
        wait_until(lambda: jobs[0].status == "elsewhere")
        write_end(jobs[0].folder, "failed", reason="theirs")
        let_go()
        wait_until(lambda: jobs[0].status == "failed")
        (tmp_path / "go").touch()

    when(jobs[0].folder / "tries", end)
    assert run_all(jobs) == 1
    assert [one.status for one in jobs] == ["failed", "completed", "not run"]


@pytest.mark.parametrize("since", [True, False])
@pytest.mark.parametrize("rerun", Rerun)
def test_what_failed_in_another_process_is_before_if_such_are_left_or_if_it_has_failed_since(tmp_path, rerun, since):
    jobs = jobs_of(tmp_path, "print('own words'); sys.exit(1)", rerun=rerun)
    write_status(jobs[0].folder, "failed", reason="theirs", updated=jobs[0].asked_at + (1 if since else -1))
    assert run_all(jobs) == 1
    left = since or rerun is Rerun.never
    expected = ("failed", "theirs", True) if left else ("failed", "own words", False)
    assert (jobs[0].status, jobs[0].reason, jobs[0].before) == expected


def test_an_earlier_status_is_no_excuse_for_a_process_that_broke(tmp_path):
    jobs = jobs_of(tmp_path, *["print('broken'); sys.exit(1)"] * 2)
    for one, status in zip(jobs, ("completed", "running"), strict=True):
        write_status(one.folder, status)
    assert run_all(jobs, places=2) == 1
    assert stands(jobs) == [("failed", "broken")] * 2


def test_an_earlier_process_that_had_the_same_number_is_another_one(tmp_path):
    jobs = jobs_of(tmp_path, "status('completed', updated=time.time() - 3600)")
    assert run_all(jobs) == 0
    assert (jobs[0].status, jobs[0].before) == ("completed", True)


def test_a_check_is_checked_or_failed(tmp_path):
    checked = f"import atexit; atexit.register(print, 'goodbye'); print('bf16: {CHECKED}')"
    jobs = jobs_of(tmp_path, checked, "sys.exit('precision-lab: seed is wrong')", "os._exit(0)", check=True)
    assert run_all(jobs) == 1
    nothing = "ended with exit code 0 and without a result"  # its own word is wanted, not its silence
    assert stands(jobs) == [("checked", ""), ("failed", "seed is wrong"), ("failed", nothing)]


def test_a_check_says_which_jobs_do_not_fit(tmp_path):
    code = f"""
    (order.folder / "check.json").write_text(json.dumps(dict(out_of_memory="out of memory in the forward pass")))
    print('bf16: {CHECKED}')
    """
    jobs = jobs_of(tmp_path, code, check=True)
    assert run_all(jobs) == 0
    assert stands(jobs) == [("out_of_memory", "out of memory in the forward pass")]


def test_the_last_word_of_a_job_is_told_without_the_beginning_of_the_log_s_line(tmp_path):
    said = "2026-01-31 12:00:00,123 ERROR not gone on with: KeyError: 'a'"
    jobs = jobs_of(tmp_path, f"print({said!r}); sys.exit(1)")
    assert run_all(jobs) == 1
    assert stands(jobs) == [("failed", "not gone on with: KeyError: 'a'")]


def test_a_check_of_a_job_that_was_run_before_is_checked(tmp_path):
    jobs = jobs_of(tmp_path, f"print('bf16: {CHECKED}')", check=True)
    write_status(jobs[0].folder, "completed")
    assert run_all(jobs) == 0
    assert (jobs[0].status, jobs[0].before) == ("checked", False)


@pytest.mark.parametrize("on_error", OnError)
def test_a_job_that_cannot_be_started_has_failed(tmp_path, on_error):
    jobs = jobs_of(tmp_path, COMPLETED, COMPLETED, on_error=on_error)
    jobs[0].folder.touch()  # a file where the folder should be
    assert run_all(jobs) == 1
    assert jobs[0].status == "failed"
    assert jobs[0].reason == f"could not be started (File exists: {jobs[0].folder})"
    assert jobs[1].status == {"continue": "completed", "stop": "not run"}[on_error.name]


def test_a_program_that_is_not_there_is_told_of_each_job(tmp_path):
    jobs = jobs_of(tmp_path, COMPLETED, COMPLETED)
    assert run_all(jobs, child=["/no/such/program"]) == 1
    assert all("/no/such/program" in one.reason for one in jobs)


# --- a disk that takes no more ---------------------------------------------------------------


class FullDisk:
    """Stands in for a temporary file; `takes` bytes, then it is full."""

    def __init__(self, takes=0):
        self.takes = takes

    def __call__(self, dir, buffering):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def write(self, data):
        if not self.takes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.takes


@pytest.mark.parametrize("takes", [0, 100])
@pytest.mark.parametrize(
    "code", ["sys.exit(1)", "status('running'); sys.exit(1)", "status('running'); os.kill(os.getpid(), signal.SIGBUS)"]
)
def test_a_job_that_could_not_say_that_its_disk_is_full_is_spoken_for(tmp_path, monkeypatch, takes, code):
    jobs, out = jobs_of(tmp_path, code), io.StringIO()
    monkeypatch.setattr(launch.tempfile, "TemporaryFile", FullDisk(takes))
    assert run_all(jobs, out=out) == 1
    assert stands(jobs) == [("failed", "its folder cannot be written (No space left on device)")]
    assert (
        f"failed (its folder cannot be written (No space left on device); see {tmp_path}/job0/train.log)"
        in out.getvalue()
    )


def test_a_read_only_disk_is_told(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    jobs = jobs_of(tmp_path, "status('running'); sys.exit(1)")
    monkeypatch.setattr(launch.tempfile, "TemporaryFile", refuse)
    assert run_all(jobs) == 1
    assert stands(jobs) == [("failed", "its folder cannot be written (Read-only file system)")]


def test_a_folder_that_is_gone_is_told_and_not_made_again(tmp_path):
    jobs = jobs_of(tmp_path, "import shutil; status('running'); shutil.rmtree(here); sys.exit(1)", COMPLETED)
    assert run_all(jobs) == 1
    assert stands(jobs) == [("failed", "its folder is gone"), ("completed", "")]
    assert not jobs[0].folder.exists()


def test_what_a_job_could_still_say_of_its_disk_is_its_reason_and_the_same_command_runs_it(tmp_path):
    words = "model.pt cannot be written (No space left on device)."
    jobs, out = jobs_of(tmp_path, f"status('interrupted', '{words}'); sys.exit(1)"), io.StringIO()
    view = View(jobs, [], console=Console(file=out, width=200))
    assert run_jobs(jobs, [{}], view, [sys.executable, "-c", FAKE]) == 1
    assert stands(jobs) == [("failed", words)]
    view.summary()
    assert "1 of 1 jobs are left; the same command runs them." in out.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which is always full")
def test_a_log_that_takes_no_word_changes_nothing_for_the_real_job(tmp_path):
    code = """
    import os
    from pathlib import Path
    print("x" * 100_000)
    sys.stderr.write("no line's end")
    (Path(asked.paths.outputs) / "done").touch()
    """
    jobs = jobs_of(tmp_path, code)
    jobs[0].folder.mkdir()
    order = pickle.dumps(launch.Order(jobs[0].asked, sys.path, ["train.py"], jobs[0].folder, jobs[0].asked_at))
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen([sys.executable, "-c", REAL], stdin=subprocess.PIPE, stdout=full, stderr=full)
        process.stdin.write(order)
        process.stdin.flush()
        wait_until(lambda: process.poll() is not None)
        process.stdin.close()
    assert process.returncode == 0
    assert (jobs[0].folder / "done").exists()


# --- signals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 143)])
def test_a_signal_to_the_sweep_reaches_the_job_and_the_rest_is_not_run(tmp_path, lead, name, code):
    jobs = jobs_of(tmp_path, STOPPABLE, COMPLETED)
    process = lead(jobs)
    wait_until((jobs[0].folder / "ready").exists)
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(out) == [["interrupted", ""], ["not run", "interrupted before it began"]]
    assert (jobs[0].folder / "signal").read_text() == name
    assert not jobs[1].folder.exists()


def test_sigusr1_goes_to_the_jobs_that_have_begun_and_ends_nothing(tmp_path, lead):
    listens = """
    signal.signal(signal.SIGUSR1, lambda *_: (here / "signal").touch())
    status("running"); (here / "ready").touch()
    wait_for(here / "signal")
    status("completed")
    """
    loads = """
    signal.signal(signal.SIGUSR1, lambda *_: (here / "signal").touch())
    (here / "ready").touch()
    wait_for(here / "go")
    status("completed")
    """
    for number, code in enumerate((listens, loads)):
        jobs = [job(tmp_path / f"job{number}", code)]
        process = lead(jobs)
        wait_until((jobs[0].folder / "ready").exists)
        process.send_signal(signal.SIGUSR1)
        (jobs[0].folder / "go").touch()
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, json.loads(out)) == (0, [["completed", ""]])
        assert (jobs[0].folder / "signal").exists() == (code is listens)


def test_a_signal_reaches_all_that_run_and_the_first_one_decides(tmp_path):
    slow = STOPPABLE.replace('status("interrupted")', 'time.sleep(0.3); status("interrupted")')
    jobs = jobs_of(tmp_path, slow, slow)

    def both():
        wait_until((jobs[1].folder / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((jobs[0].folder / "signal").exists)
        os.kill(os.getpid(), signal.SIGINT)

    when(jobs[0].folder / "ready", both)
    assert run_all(jobs, places=2) == 143
    assert [(one.folder / "signal").read_text() for one in jobs] == ["SIGTERM"] * 2
    assert [one.status for one in jobs] == ["interrupted"] * 2


def test_a_signal_while_the_last_job_ends_is_no_reason_to_run_it_again(tmp_path):
    """The job was finishing its files, and held the signal back."""
    code = """
    signal.signal(signal.SIGTERM, lambda *_: (here / "signal").touch())
    status("running"); (here / "ready").touch()
    wait_for(here / "signal")
    status("completed")
    """
    jobs = jobs_of(tmp_path, code)
    when(jobs[0].folder / "ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_all(jobs) == 143
    assert stands(jobs) == [("completed", "")]


def test_a_job_that_ignores_signals_is_killed_when_patience_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_S", 0.2)
    jobs = jobs_of(tmp_path, DEAF, COMPLETED)
    when(jobs[0].folder / "ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    assert run_all(jobs) == 143
    assert time.monotonic() - began < 25
    pid = json.loads((jobs[0].folder / "status.json").read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert jobs[1].status == "not run"
    # whose end the sweep itself was: neither a failure nor want of memory, and the same command runs it
    assert jobs[0].status == "interrupted"
    assert "memory" not in jobs[0].reason


def test_a_job_that_has_not_read_what_it_is_given_holds_up_nothing(tmp_path):
    """More than a pipe takes: the sweep must not wait until it is read."""
    unread = f"import time; open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(30)"
    jobs = jobs_of(tmp_path, "", model={**composed().model, "text": "x" * 300_000})
    when(tmp_path / "ready", lambda: os.kill(os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    assert run_all(jobs, child=unread) == 143
    assert time.monotonic() - began < 25
    assert stands(jobs) == [("interrupted", "")]


def test_the_end_of_the_sweep_itself_is_seen_by_the_job(tmp_path, lead):
    code = "(here / 'ready').touch(); end = os.read(0, 1); (here / 'end').write_text(repr(end))"
    jobs = jobs_of(tmp_path, code)
    process = lead(jobs)
    wait_until((jobs[0].folder / "ready").exists)
    time.sleep(0.1)
    assert not (jobs[0].folder / "end").exists()
    process.kill()
    wait_until(lambda: (jobs[0].folder / "end").exists() and (jobs[0].folder / "end").read_text())
    assert (jobs[0].folder / "end").read_text() == "b''"


def test_signals_are_as_they_were_before(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run_all(jobs_of(tmp_path, COMPLETED))
    assert [signal.getsignal(number) for number in numbers] == before


def test_what_nohup_ignores_stops_no_sweep(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        jobs = jobs_of(tmp_path, "os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.1); status('completed')")
        assert run_all(jobs) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stands(jobs) == [("completed", "")]


# --- places ----------------------------------------------------------------------------------


def test_two_places_run_two_jobs_at_a_time_each_with_its_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    code = """
    (here / "gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"] + os.environ["WANDB_MODE"])
    wait_for(here.parent / "job{}" / "gpu")
    status("completed")
    """
    jobs = jobs_of(tmp_path, code.format(1), code.format(0), code.format(0))
    assert run_all(jobs, places=[{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]) == 0
    one, two, three = ((one.folder / "gpu").read_text() for one in jobs)
    assert (one, two) == ("2disabled", "3disabled")
    assert three in (one, two)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_never_more_jobs_run_than_there_are_places(tmp_path):
    code = """
    (here / "on").touch()
    time.sleep(0.1)
    print(len(list(here.parent.glob("*/on"))), flush=True)
    (here / "on").unlink()
    status("completed")
    """
    jobs = jobs_of(tmp_path, *[code] * 5)
    assert run_all(jobs, places=2) == 0
    assert {int((one.folder / "train.log").read_text()) for one in jobs} <= {1, 2}


@pytest.mark.parametrize(
    ("visible", "gpus", "places"),
    [
        (None, (), [None]),
        (None, (0,), [None]),  # one job at a time needs no telling
        ("3", (0,), [None]),
        (None, (0, 1), ["0", "1"]),
        (None, (0, 2), ["0", "2"]),  # the second one is of another model
        ("2,3", (0, 1), ["2", "3"]),
        ("5,2,3", (0, 2), ["5", "3"]),
        ("GPU-8932f937,GPU-4b2e11aa", (0, 1), ["GPU-8932f937", "GPU-4b2e11aa"]),
        ("", (0, 1), ["0", "1"]),
        ("2,3,", (0, 1), ["2", "3"]),
    ],
)
def test_each_of_several_gpus_is_a_place(monkeypatch, visible, gpus, places):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places_for(gpus) == [{"CUDA_VISIBLE_DEVICES": one} if one else {} for one in places]


# --- what a job is given ---------------------------------------------------------------------


@pytest.mark.parametrize("child", [FAKE, REAL], ids=["fake", "real"])
@pytest.mark.parametrize(
    "extra", [{"text": "x" * 300_000}, {"layers": [f"layer {n}" for n in range(20_000)]}], ids=["text", "many"]
)
def test_a_config_larger_than_a_pipe_reaches_the_job(tmp_path, child, extra):
    code = """
    from pathlib import Path
    here, model = Path(order.asked.paths.outputs if "order" in globals() else asked.paths.outputs), None
    model = order.asked.model if "order" in globals() else asked.model
    (here / "size").write_text(str(len(model.get("text", model.get("layers")))))
    """
    jobs = jobs_of(tmp_path, code, model={**composed().model, **extra})
    run_all(jobs, child=child)
    (expected,) = map(len, extra.values())
    size = jobs[0].folder / "size"
    assert size.exists(), (jobs[0].folder / "train.log").read_text()
    assert size.read_text() == str(expected)


def test_a_job_is_given_the_command_and_the_path_that_it_would_have_by_itself(tmp_path):
    jobs = [job(tmp_path / "job", "print(repr((order.command, order.path)))", ["seed=1", "name=a b"])]
    run_all(jobs)
    command = [str(ROOT / "train.py"), "seed=1", "name=a b"]
    assert (tmp_path / "job" / "train.log").read_text() == f"{(command, sys.path)!r}\n"


def test_the_real_job_has_the_command_as_its_own_and_no_secret_in_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wandb-0123456789")
    code = """
    import os
    print(sys.argv[1:], "of the model: model-9876543210")
    print(os.environ["WANDB_API_KEY"], file=sys.stderr)
    print("prompt", repr(sys.stdin.read()), "ü \\udcff")
    raise ValueError("model-9876543210")
    """
    jobs = [job(tmp_path / "job", code, ["seed=1"], model={**composed().model, "api_key": "model-9876543210"})]
    assert run_all(jobs, child=REAL) == 1
    log = (tmp_path / "job" / "train.log").read_text()
    assert log.startswith("['seed=1'] of the model: [redacted]\n[redacted]\nprompt '' ü \\udcff\nTraceback")
    assert stands(jobs) == [("failed", "ValueError: [redacted]")]


def test_the_real_job_words_wrong_input_and_exits_as_a_run_does(tmp_path):
    code = "from precision_lab.errors import InputError; raise InputError('dataset: no such file.')"
    jobs = jobs_of(tmp_path, code)
    run_all(jobs, child=REAL)
    assert stands(jobs) == [("failed", "dataset: no such file.")]
    assert "Traceback" not in (jobs[0].folder / "train.log").read_text()


def test_the_real_job_stops_as_at_sigterm_when_the_sweep_is_gone(tmp_path):
    code = """
    import signal, time
    from pathlib import Path
    def end(*_):
        (Path(asked.paths.outputs) / "end").touch()
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, end)
    (Path(asked.paths.outputs) / "ready").touch()
    time.sleep(600)
    """
    jobs = jobs_of(tmp_path, code)
    jobs[0].folder.mkdir()
    order = launch.Order(jobs[0].asked, sys.path, ["train.py"], jobs[0].folder, jobs[0].asked_at)
    with subprocess.Popen([sys.executable, "-c", REAL], stdin=subprocess.PIPE) as process:
        process.stdin.write(pickle.dumps(order))
        process.stdin.flush()
        wait_until((jobs[0].folder / "ready").exists)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=60) == 143
    assert (jobs[0].folder / "end").exists()


# --- nothing left ----------------------------------------------------------------------------


def test_no_process_no_pipe_and_no_thread_is_left(tmp_path):
    unread = "import os; os.kill(os.getpid(), 9)"
    large = {**composed().model, "text": "x" * 300_000}
    run_all(jobs_of(tmp_path / "first", COMPLETED))
    files, threads = sorted(os.listdir("/dev/fd")), threading.active_count()
    assert run_all(jobs_of(tmp_path / "read", COMPLETED, "sys.exit(1)", COMPLETED), places=2) == 1
    assert run_all(jobs_of(tmp_path / "unread", "", model=large), child=unread) == 1
    assert run_all(jobs_of(tmp_path / "none", COMPLETED), child=["/no/such/program"]) == 1
    wait_until(lambda: threading.active_count() <= threads)
    assert sorted(os.listdir("/dev/fd")) == files
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_that_a_job_leaves_behind_holds_up_nothing(tmp_path):
    code = """
    if os.fork() == 0:
        (here / "worker").write_text(str(os.getpid()))
        time.sleep(30)
        os._exit(0)
    wait_for(here / "worker")
    status("completed")
    os._exit(0)
    """
    jobs = jobs_of(tmp_path, code, COMPLETED)
    began = time.monotonic()
    try:
        assert run_all(jobs) == 0
        assert time.monotonic() - began < 25
    finally:
        os.kill(int((jobs[0].folder / "worker").read_text()), signal.SIGKILL)
