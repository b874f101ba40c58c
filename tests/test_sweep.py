"""Sweeps as a person starts them: `python train.py -m ...`, what they leave, survive, say and refuse."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from precision_lab.config import ROOT

OWN_CODE = Path(__file__).parent / "own_code"
OWN = [
    "model=custom",
    "dataset=custom",
    "dataset._target_=jobs.line_data",
    "task=custom",
    "task._target_=jobs.regression",
]
OWN += ["trainer.batch_size=8", "trainer.steps=6", "trainer.log_every=2", "probe.memory=false", "meter.warmup_steps=2"]
CASE = [*OWN, "model._target_=jobs.Case"]
SMOKE = ["experiment=smoke", "precision=fp32,bf16,fp16", "seed=0,1,2"]


def command(folder: Path, *words: str, **environment: str) -> dict:
    """Arguments for subprocess: train.py with these words, in an empty working directory below `folder`."""
    cwd = folder / "elsewhere"
    cwd.mkdir(parents=True, exist_ok=True)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    path = os.pathsep.join([str(ROOT / "src"), str(OWN_CODE)])
    fixed = ["device=cpu", "device.threads=1", f"paths.outputs={folder / 'outputs'}"]
    return {
        "args": [sys.executable, str(ROOT / "train.py"), *words, *fixed],
        "cwd": cwd,
        "env": inherited | {"PYTHONPATH": path, "WANDB_MODE": "disabled", "COLUMNS": "100"} | environment,
        "text": True,
    }


@dataclass
class Sweep:
    code: int
    out: str
    err: str
    folder: Path
    name: str = "unnamed"
    jobs: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = jobs_in(self.folder, self.name)

    def json(self, file: str) -> list[dict]:
        return [json.loads((job / file).read_text()) for job in self.jobs.values()]


def jobs_in(folder: Path, name: str) -> dict[str, Path]:
    found = (folder / "outputs" / "sweeps" / name).glob("*")
    return {path.name: path for path in sorted(found) if path.name != "commands"}


def sweep(folder: Path, *words: str, name: str = "unnamed", **environment: str) -> Sweep:
    done = subprocess.run(**command(folder, "-m", *words, **environment), capture_output=True, timeout=300)
    return Sweep(done.returncode, done.stdout, done.stderr, folder, name)


def single(folder: Path, *words: str) -> Path:
    subprocess.run(**command(folder, *words), capture_output=True, timeout=120, check=True)
    (made,) = (folder / "outputs").glob("runs/*/*")
    return made


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as two:
        yield two


# ---- nine jobs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    return sweep(tmp_path_factory.mktemp("nine"), *SMOKE, name="smoke", WANDB_MODE="offline")


def test_every_job_completes_in_a_folder_and_a_process_of_its_own(nine):
    assert nine.code == 0, nine.out + nine.err
    assert nine.err == ""
    assert len(nine.jobs) == 9
    told = nine.json("status.json")
    assert {status["status"] for status in told} == {"completed"}
    assert len({status["pid"] for status in told}) == 9
    results = nine.json("result.json")
    assert {(result["arm"], result["seed"]) for result in results} == {
        (arm, seed) for arm in ("fp32", "bf16", "fp16") for seed in (0, 1, 2)
    }
    assert len({result["experiment_signature"] for result in results}) == 1
    for result, name in zip(results, nine.jobs, strict=True):
        assert name.endswith(f"_s{result['seed']}_cpu_{result['run_signature']}")
    assert list((nine.folder / "elsewhere").iterdir()) == []


def test_arms_are_interleaved_seed_by_seed_and_rotated(nine):
    order = sorted(nine.json("result.json"), key=lambda result: started(nine, result))
    assert [result["seed"] for result in order] == [0] * 3 + [1] * 3 + [2] * 3
    arms = [[result["arm"] for result in order[block : block + 3]] for block in (0, 3, 6)]
    assert arms == [["fp32", "bf16", "fp16"], ["bf16", "fp16", "fp32"], ["fp16", "fp32", "bf16"]]


def started(done: Sweep, result: dict) -> float:
    (folder,) = [path for name, path in done.jobs.items() if name.endswith(result["run_signature"])]
    return json.loads((folder / "status.json").read_text())["started"]


def test_what_the_terminal_shows(nine):
    lines = nine.out.splitlines()
    assert lines[0].startswith("cpu: ")
    done = [line for line in lines if re.match(r"\[\d/9\] precision=\w+ seed=\d: completed: step 60, ", line)]
    assert len(done) == 9
    assert len([line for line in lines if re.match(r"precision=\w+ seed=\d +completed +60 ", line)]) == 9
    assert lines[-1] == f"compare: python scripts/compare.py {nine.folder}/outputs/sweeps/smoke"
    shown = subprocess.run(
        [sys.executable, *lines[-1].split()[2:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert [line.split()[:3] for line in shown.stdout.splitlines() if " completed " in line] == [
        [arm, "3", "completed"] for arm in ("fp32", "bf16", "fp16")
    ]


def records(log: Path, *options: str) -> list[dict]:
    words = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(log)]
    text = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    return [json.loads(text)] if options else [json.loads(line) for line in text.splitlines()]


def test_wandb_holds_what_the_local_folders_hold(nine, pool):
    logs = {path.parent.name: path for path in (nine.folder / "outputs" / "wandb").glob("offline-run-*/run-*.wandb")}
    assert len(logs) == 9
    for folder, read in zip(
        nine.jobs.values(), pool.map(lambda job: read_back(job, logs), nine.jobs.values()), strict=True
    ):
        raw, summary = read
        result = json.loads((folder / "result.json").read_text())
        run = next(record["run"] for record in raw if record["type"] == "run")
        assert run["run_group"] == f"smoke-{result['experiment_signature']}"
        assert run["job_type"] == "train"
        assert run["tags"] == [result["arm"], "cpu"]
        assert run["display_name"] == folder.name
        assert run["run_id"].startswith(folder.name)
        assert raw[-1]["exit"]["exit_code"] == 0
        config = summary["config"]
        assert config["config"] == result["config"]
        assert (config["precision"], config["seed"], config["model"]) == (result["arm"], result["seed"], "mlp")
        logged = [record["history"]["item"] for record in raw if record["type"] == "history"]
        logged = [{key: value for key, value in line.items() if not key.startswith("_")} for line in logged]
        local = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert local == logged
        own = {key: value for key, value in summary["summary"].items() if key.startswith(("final/", "best/"))}
        assert own == {key: value for key, value in result["summary"].items() if value is not None}
        assert (summary["summary"]["status"], summary["summary"]["reason"]) == ("completed", "")


def read_back(folder: Path, logs: dict[str, Path]) -> tuple[list[dict], dict]:
    (log,) = [path for name, path in logs.items() if folder.name in name]
    return records(log), records(log, "--summary")[0]


def test_the_same_command_runs_nothing_again(nine):
    before = {path: path.stat().st_mtime_ns for path in nine.folder.rglob("result.json")}
    again = sweep(nine.folder, *SMOKE, name="smoke", WANDB_MODE="offline")
    assert again.code == 0
    assert "9 of 9 jobs had been run before and were left as they are." in again.out
    assert {path: path.stat().st_mtime_ns for path in nine.folder.rglob("result.json")} == before
    assert len(list((nine.folder / "outputs" / "sweeps" / "smoke" / "commands").glob("*/multirun.yaml"))) == 2


def test_other_hardware_is_not_taken_for_this_one(nine, tmp_path):
    (old,) = [path for name, path in nine.jobs.items() if "_fp32_s0_" in name]
    copy = tmp_path / "outputs" / "sweeps" / "smoke" / old.name
    shutil.copytree(old, copy)
    result = json.loads((copy / "result.json").read_text())
    result["fingerprint"]["model"] = "Tesla V100"
    (copy / "result.json").write_text(json.dumps(result))
    refused = sweep(tmp_path, "experiment=smoke", "precision=fp32", name="smoke")
    assert refused.code == 2
    assert "was run on other hardware (model Tesla V100, here " in refused.err


# ---- none touches another ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    """Two jobs that leave everything turned over and a third one; the third alone; and what each found."""
    together, alone = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("alone")
    words = [*OWN, "model._target_=jobs.Leaky", "precision=fp32"]
    done = sweep(together, *words, f"+model.notes={together}/notes", "+model.leave=1,2,0")
    assert done.code == 0, done.out + done.err
    own = single(alone, *words, f"+model.notes={alone}/notes", "+model.leave=0")
    (third,) = [path for path in done.jobs.values() if config_of(path)["model"]["leave"] == 0]
    assert max(done.jobs.values(), key=lambda path: (path / "config.yaml").stat().st_mtime) == third  # it ran last
    return third, own, noted(together, 0), noted(alone, 0), noted(together, 1)


def noted(where: Path, leave: int) -> dict:
    """What the job found; an earlier note is of the process that tried the sweep's input."""
    return json.loads(max((where / "notes").glob(f"{leave}-*.json"), key=lambda path: path.stat().st_mtime).read_text())


def config_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())["config"]


def test_a_job_alone_equals_the_same_job_as_third_in_a_sweep(leaky):
    third, alone = (json.loads((folder / "result.json").read_text()) for folder in leaky[:2])
    assert third["hashes"]["losses"] == alone["hashes"]["losses"]
    for key in ("hashes.data", "hashes.initial_weights", "hashes.batches"):
        assert third["hashes"][key[7:]] == alone["hashes"][key[7:]]
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in leaky[:2]]
    timeless = [[without_times(json.loads(line)) for line in some] for some in lines]
    assert timeless[0] == timeless[1]
    assert "val/loss_fp32" in timeless[0][-1]
    flags = [json.loads((folder / "environment.json").read_text())["backend_flags"] for folder in leaky[:2]]
    assert flags[0] == flags[1]


def without_times(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith("perf/")}


@pytest.mark.parametrize("what", ["flags", "threads", "generators", "environment"])
def test_what_a_job_sets_is_never_seen_by_the_next(leaky, what):
    _, _, third, alone, _ = leaky
    assert third[what] == alone[what]


def test_a_jobs_memory_peak_is_never_seen_by_the_next(leaky):
    _, _, third, alone, _ = leaky
    assert third["peak_mib"] < alone["peak_mib"] + 100  # the jobs before it took 300 MiB more


# ---- jobs that go wrong -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    words = [*CASE, "+model.case=good,bad,oops", "precision=tf32,fp32", "on_unsupported=skip"]
    return words, sweep(folder, *words)


def test_a_failing_a_diverging_and_an_unsupported_job_leave_the_others_alone(mixed):
    _, done = mixed
    assert done.code == 1
    statuses = {
        config_of(path)["model"]["case"]: told["status"]
        for path, told in zip(done.jobs.values(), done.json("status.json"), strict=True)
    }
    assert statuses == {"good": "completed", "bad": "diverged", "oops": "failed"}
    rows = {tuple(re.split(r"  +", line)[:2]) for line in done.out.splitlines()}
    for case, status in statuses.items():
        assert (f"+model.case={case} precision=fp32", status) in rows
        assert (f"+model.case={case} precision=tf32", "unsupported") in rows
    assert done.out.count("precision=tf32 needs tf32, which this cpu device does not have") == 1
    assert "1 completed, 1 diverged, 1 failed, 3 unsupported" in done.out
    assert "Traceback" not in done.out + done.err


def test_the_failed_jobs_log_holds_its_traceback_and_its_line_says_where(mixed):
    _, done = mixed
    (failed,) = [path for path in done.jobs.values() if config_of(path)["model"]["case"] == "oops"]
    log = (failed / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "no case 'oops'" in log
    (line,) = [line for line in done.out.splitlines() if line.startswith("[") and "failed" in line]
    assert "model: jobs.Case refused its arguments: no case 'oops'" in line
    assert line.endswith(f"see {failed / 'train.log'})")


def test_rerun_failed_runs_that_one_alone(mixed):
    words, done = mixed
    (failed,) = [path for path in done.jobs.values() if config_of(path)["model"]["case"] == "oops"]
    pids = {path: json.loads((path / "status.json").read_text())["pid"] for path in done.jobs.values()}
    kept = sweep(done.folder, *words)
    assert kept.code == 1  # it still holds a failed job
    assert "rerun=failed" in kept.out
    assert {path: json.loads((path / "status.json").read_text())["pid"] for path in done.jobs.values()} == pids
    again = sweep(done.folder, *words, "rerun=failed")
    assert again.code == 1
    now = {path: json.loads((path / "status.json").read_text())["pid"] for path in done.jobs.values()}
    assert {path for path in now if now[path] != pids[path]} == {failed}
    assert json.loads((failed / "attempts" / "1" / "status.json").read_text())["pid"] == pids[failed]
    assert (failed / "train.log").read_text().count("Traceback (most recent") >= 2


@pytest.mark.slow
def test_twelve_jobs_of_which_four_go_wrong(tmp_path):
    (tmp_path / "killed_once").touch()
    words = [*CASE, "precision=fp32", f"+model.killed_once={tmp_path}/killed_once"]
    words += ["+model.case=1,2,bad,3,greedy,4,oops,5,killed,6,7,8"]
    done = sweep(tmp_path, *words)
    assert done.code == 1, done.out + done.err
    assert done.err == ""
    assert "Traceback" not in done.out
    wrong = {"bad": "diverged", "greedy": "out_of_memory", "oops": "failed", "killed": "failed"}
    rows = re.findall(r"^model\.case=(\w+) +(\w+) +\S+ ", done.out.replace("+model", "model"), re.MULTILINE)
    assert dict(rows) == {str(n): "completed" for n in range(1, 9)} | wrong
    assert "8 completed, 1 diverged, 1 out_of_memory, 2 failed" in done.out
    assert "case=killed: failed (killed by SIGKILL, perhaps for want of memory; see " in done.out
    assert "1 of 12 jobs are left; the same command runs them." in done.out
    assert "The same command with rerun=failed runs the failed ones again." in done.out
    before = pids(tmp_path)
    again = sweep(tmp_path, *words)
    assert again.code == 1  # it still holds a failed job
    assert "11 of 12 jobs had been run before and were left as they are." in again.out
    assert "are left;" not in again.out
    changed = [name for name, pid in pids(tmp_path).items() if pid != before[name]]
    assert [(config_of(done.jobs[name])["model"]["case"], status_of(tmp_path, name)) for name in changed] == [
        ("killed", "completed")
    ]


def test_an_unsupported_arm_is_named_before_anything_runs(tmp_path):
    done = sweep(tmp_path, *CASE, "precision=fp32,tf32")
    assert done.code == 2
    assert done.err.startswith(
        "precision-lab: precision=tf32 needs tf32, which this cpu device does not have; it can do "
    )
    assert "on_unsupported=skip" in done.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["precision=fp32,fp23"], "precision=fp23 does not exist"),
        (["trainer.steps=5,0"], "trainer.steps=0 is too small"),
        (["trainer.workers=0,1"], "trainer.workers=0 and trainer.workers=1 are one and the same run"),
        (["hydra/launcher=basic"], "hydra/launcher=basic runs all jobs in one process"),
    ],
)
def test_wrong_input_is_answered_before_anything_is_written(tmp_path, words, sentence):
    done = sweep(tmp_path, *CASE, *words)
    assert done.code == 2, done.out + done.err
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_check_trains_nothing(tmp_path):
    done = sweep(tmp_path, *CASE, "+model.case=good,oops", "precision=fp32", "check=true")
    assert done.code == 1
    assert re.search(r"case=good +checked", done.out)
    assert "no case 'oops'" in done.out
    assert not (tmp_path / "outputs").exists()


# ---- kills ------------------------------------------------------------------------------------------------

SLOW = [*CASE, "precision=fp32", "seed=0,1,2", "+model.seconds=0.1", "trainer.steps=10"]


def start(folder: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        **command(folder, "-m", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for(what, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def states(folder: Path) -> list[str]:
    paths = sorted((folder / "outputs").glob("sweeps/unnamed/*/status.json"), key=lambda path: path.parent.name)
    return [json.loads(path.read_text())["status"] for path in paths]


def pids(folder: Path) -> dict[str, int]:
    return {
        path.parent.name: json.loads(path.read_text())["pid"] for path in folder.rglob("sweeps/unnamed/*/status.json")
    }


def test_a_killed_sweep_is_taken_up_where_it_was(tmp_path):
    killed = start(tmp_path, *SLOW)
    wait_for(lambda: states(tmp_path).count("completed") == 1 and "running" in states(tmp_path))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert sorted(states(tmp_path)) == ["completed", "running"]  # of a dead process
    before = pids(tmp_path)
    (finished,) = [name for name in before if status_of(tmp_path, name) == "completed"]
    done = sweep(tmp_path, *SLOW)
    assert done.code == 0, done.out + done.err
    assert states(tmp_path) == ["completed"] * 3
    assert [name for name in before if pids(tmp_path)[name] == before[name]] == [finished]
    assert "1 of 3 jobs had been run before" in done.out
    steps = [
        json.loads(line)["train/step"] for line in (done.jobs[finished] / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [2, 4, 6, 8, 10]


def status_of(folder: Path, name: str) -> str:
    return json.loads((folder / "outputs" / "sweeps" / "unnamed" / name / "status.json").read_text())["status"]


def test_a_job_ends_when_the_sweep_is_gone(tmp_path):
    words = [word.replace("trainer.steps=10", "trainer.steps=300") for word in SLOW]
    killed = start(tmp_path, *words)
    wait_for(lambda: list(tmp_path.rglob("metrics.jsonl")))
    (pid,) = pids(tmp_path).values()
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: states(tmp_path) == ["interrupted"])  # long before it would have completed
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or killed.poll() is not None)
    (result,) = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    assert result["reason"] == "the sweep that started it is gone"
    assert result["step"] >= 2
    killed.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_ends_its_job_and_says_what_is_left(tmp_path, number, code):
    words = [word.replace("trainer.steps=10", "trainer.steps=300") for word in SLOW]
    stopped = start(tmp_path, *words)
    wait_for(lambda: list(tmp_path.rglob("metrics.jsonl")))
    send = os.killpg if number == signal.SIGINT else os.kill  # Ctrl-C goes to all, SIGTERM to one
    send(stopped.pid, number)
    out, err = stopped.communicate(timeout=30)
    assert stopped.returncode == code, out + err
    assert states(tmp_path) == ["interrupted"]
    assert "3 of 3 jobs are left; the same command runs them." in out
    assert re.search(r"seed=1 +not run", out)
    assert err == ""


def test_a_job_that_is_still_run_by_a_killed_sweep_is_waited_for_and_taken_up(tmp_path):
    """Its process is in the middle of a long step, and cannot yet see that the sweep is gone."""
    script, order = tmp_path / "long", tmp_path / "order"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05; done\n")
    script.chmod(0o755)
    order.write_text(f"run {script}")
    words = [*OWN, "model._target_=jobs.Spoiler", f"+model.order={order}", "+model.step=3", "precision=fp32"]
    killed = start(tmp_path, *words, "seed=0,1")
    wait_for((tmp_path / "begun").exists)
    os.kill(killed.pid, signal.SIGKILL)
    (pid,) = pids(tmp_path).values()
    again = start(tmp_path, *words, "seed=0,1")
    said = iter(again.stdout.readline, "")
    line = next((line for line in said if line.startswith("waiting for ")), "")
    assert re.fullmatch(rf"waiting for 1 job that is run elsewhere \(pid {pid} on .+ since \d\d:\d\d\)\n", line)
    assert sorted(states(tmp_path)) == ["completed", "running"]  # it has gone on with the other one
    (tmp_path / "go").touch()
    out, err = again.communicate(timeout=120)
    assert (again.returncode, err) == (0, ""), out
    assert states(tmp_path) == ["completed"] * 2
    for path in jobs_in(tmp_path, "unnamed").values():
        lines = (path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["train/step"] for line in lines] == [2, 4, 6]
    killed.communicate()


# ---- names, places and two at once ------------------------------------------------------------------------


def test_values_with_slashes_equal_signs_and_spaces(tmp_path):
    words = [*CASE, "precision=fp32,bf16", 'name="night/run a=1"', 'tags=["x=1 y/2"]']
    done = sweep(tmp_path, *words, name="night-run-a-1")
    assert done.code == 0, done.out + done.err
    assert {(result["config"]["name"], *result["config"]["tags"]) for result in done.json("result.json")} == {
        ("night/run a=1", "x=1 y/2")
    }
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"sweeps"}
    assert {path.name for path in (tmp_path / "outputs" / "sweeps").iterdir()} == {"night-run-a-1"}


@pytest.mark.parametrize("rerun", ["never", "all"])
def test_the_same_sweep_twice_at_once_shares_the_work(tmp_path, pool, rerun):
    words = [*CASE, "precision=fp32", "seed=0,1", "+model.seconds=0.05", f"rerun={rerun}"]
    both = list(pool.map(lambda _: sweep(tmp_path, *words), range(2)))
    assert [done.code for done in both] == [0, 0], [done.out + done.err for done in both]
    assert states(tmp_path) == ["completed", "completed"]
    assert list(tmp_path.rglob("attempts")) == []
    for done in both:  # what the other one runs is waited for
        assert not re.search(r"failed|interrupted|are left;|not run", done.out)
        assert "2 completed" in done.out
    for path in both[0].jobs.values():
        begun = [line for line in (path / "train.log").read_text().splitlines() if re.search(r" INFO .* -> ", line)]
        assert len(begun) == 1  # the other sweep found it taken or finished
        assert [json.loads(line)["train/step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == [
            2,
            4,
            6,
        ]
    commands = tmp_path / "outputs" / "sweeps" / "unnamed" / "commands"
    assert len(list(commands.glob("*/multirun.yaml"))) == 2


# ---- secrets ----------------------------------------------------------------------------------------------


def test_no_secret_is_written_by_a_sweep(tmp_path):
    """A variable resolved in a config, arguments on the command line, in a dict, swept over, and in an exception."""
    variable, plain, nested, swept = (
        "hunter2-0123456789",
        "correct-horse-battery",
        "staple-and-a-half",
        "tr0ub4dor-and-3",
    )
    done = sweep(
        tmp_path,
        *(*CASE, "precision=fp32", "+model.case=good,oops", f"+model.api_key={plain},{swept}"),
        *(f"+model.extra={{token:{nested}}}", "name=${oc.env:MY_API_KEY}"),
        *("tags=[${oc.env:MY_API_KEY}]", "wandb.mode=offline"),
        name="redacted",
        MY_API_KEY=variable,
    )
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"multirun.yaml", "result.json", "train.log", "environment.json"}
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (variable, plain, nested, swept):
        holders = [path.relative_to(tmp_path) for path in files if secret.encode() in path.read_bytes()]
        assert holders == [], secret
        assert not any(secret in str(path) for path in files)
        assert secret not in done.out + done.err
    assert done.code == 1
