"""scripts/mirror.py: what W&B lacks of a run's folder is made up for, whole and once; a run that goes on is let be."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precision_lab import run as run_module
from precision_lab.config import ROOT, Extra, WandbMode, compose
from precision_lab.errors import InputError
from precision_lab.run import run
from precision_lab.tracking.of_folder import ledger_of
from precision_lab.tracking.refill import KILLED, Wish, refill
from test_tracking import SMALL_RUN, Wandb

OFFLINE = Wish(WandbMode.offline)


class Package(Wandb):
    """The stand-in, with what a run's extras need."""

    AlertLevel = type("AlertLevel", (), {"WARN": "WARN"})

    def __init__(self, **fails):
        super().__init__(fails)
        self.begun = 0

    def init(self, **kwargs):
        self.begun += 1
        self.id = kwargs["id"]
        return super().init(**kwargs)

    def Table(self, columns, data, **_):
        return {"columns": columns, "data": data}

    def Artifact(self, name, type):
        artifact = Package()
        artifact.name, artifact.type = name, type
        artifact.add_file = lambda path, policy: setattr(artifact, "path", path)
        return artifact

    def log_artifact(self, artifact):
        self._call("artifact", artifact.type, Path(artifact.path).name)

    def alert(self, title, text, level):
        self._call("alert", title, text)

    def given(self):
        (kwargs,) = [kwargs for name, _, kwargs in self.calls if name == "init"]
        return {key: kwargs[key] for key in ("name", "group", "job_type", "tags", "config", "project", "mode")}

    def lines(self):
        return [args[0] for name, args, _ in self.calls if name == "log"]

    def summary_given(self):
        (values,) = [args[0] for name, args, _ in self.calls if name == "summary"]
        return values


@pytest.fixture
def package(monkeypatch):
    def install(**fails):
        stand_in = Package(**fails)
        monkeypatch.setitem(sys.modules, "wandb", stand_in)
        return stand_in

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return install


def trained(outputs, *words):
    """The folder of a small run."""
    before = set(outputs.glob("runs/*/*"))
    assert run(compose([*SMALL_RUN, f"paths.outputs={outputs}", *words])) == 0
    (folder,) = set(outputs.glob("runs/*/*")) - before
    return folder


def kill(folder):
    """Leave it as a SIGKILL in the middle does."""
    (folder / "result.json").unlink()
    state = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(
        json.dumps({key: state[key] for key in state if key != "wandb"} | {"status": "running"})
    )


def kinds(tops, wish=OFFLINE):
    return [outcome.kind for outcome in refill(tops, wish)]


def recorded(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- the same as a run would have given -----------------------------------------------------------


def test_a_disabled_run_is_mirrored_as_one_that_was_not(package, tmp_path):
    live = package()
    trained(tmp_path / "live", "wandb.mode=offline", "tags=[night]")
    silent = package()
    folder = trained(tmp_path / "late", "wandb.mode=disabled", "tags=[night]")
    assert silent.calls == []
    late = package()
    assert kinds([tmp_path / "late"]) == ["mirrored"]
    a, b = live.given(), late.given()
    for side in (a, b):
        side["config"] = {key: side["config"][key] for key in side["config"] if key not in ("config", "folder")}
    assert a == b
    assert late.calls[0][2]["dir"] == str(tmp_path / "late")
    assert late.given()["config"]["folder"] == folder.relative_to(tmp_path / "late").as_posix()
    assert [line.keys() for line in late.lines()] == [line.keys() for line in live.lines()]
    assert late.lines() == [line | {"_timestamp": line["perf/unix_s"]} for line in recorded(folder)]
    summary, result = late.summary_given(), json.loads((folder / "result.json").read_text())
    assert summary == result["summary"] | {
        "status": "completed",
        "reason": "",
        "result_json": json.dumps(result, separators=(",", ":")),
    }
    assert summary.keys() == live.summary_given().keys()


def test_a_second_time_adds_nothing_and_again_adds_one_in_its_place(package, tmp_path):
    trained(tmp_path, "wandb.mode=disabled")
    trained(tmp_path, "wandb.mode=disabled", "seed=1")
    package()
    assert kinds([tmp_path]) == ["mirrored"] * 2
    again = package()
    assert kinds([tmp_path, tmp_path / "runs"]) == ["whole before"] * 2
    assert again.begun == 0
    assert kinds([tmp_path], Wish(WandbMode.offline, again=True)) == ["mirrored"] * 2
    assert again.begun == 2
    for name, _, given in again.calls:
        if name == "init":
            assert len(given["config"]["replaces"]) == 1


def test_a_run_that_w_and_b_got_whole_is_let_be(package, tmp_path):
    live = package()
    folder = trained(tmp_path, "wandb.mode=offline")
    ledger = ledger_of(folder)
    assert (ledger.whole, ledger.lines, ledger.status, ledger.replaces) == (True, 2, "completed", [])
    assert kinds([tmp_path]) == ["whole before"]
    assert live.begun == 1


@pytest.mark.parametrize("where", ["log", "summary", "finish"])
def test_a_degraded_run_is_made_whole(package, tmp_path, where):
    package(**{where: ConnectionError("gone")})
    folder = trained(tmp_path, "wandb.mode=online")
    first = ledger_of(folder)
    assert not first.whole
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert late.given()["config"]["replaces"] == [first.id]
    assert [line["train/step"] for line in late.lines()] == [2, 4]


def test_a_killed_run_tells_so_and_is_told_again_once_it_went_further(package, tmp_path):
    package()
    folder = trained(tmp_path, "wandb.mode=disabled")
    whole = (folder / "result.json").read_text(), (folder / "status.json").read_text()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kill(folder)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1][:20])  # the last line is half there
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert [line["train/step"] for line in late.lines()] == [2]
    assert late.summary_given() == {"status": "interrupted", "reason": KILLED}
    assert late.given()["config"]["precision"] == "fp32"
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name, text in zip(("result.json", "status.json"), whole, strict=True):
        (folder / name).write_text(text)
    further = package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert [line["train/step"] for line in further.lines()] == [2, 4]
    assert further.summary_given()["status"] == "completed"


def test_what_w_and_b_had_of_it_is_set_aside_and_kept(package, tmp_path):
    """So that its files hold every log point once."""
    package(finish=ConnectionError("gone"))
    folder = trained(tmp_path, "wandb.mode=offline")
    part = tmp_path / "wandb" / f"offline-run-20260101_000000-{ledger_of(folder).id}"
    other = tmp_path / "wandb" / "offline-run-20260101_000000-another-run"
    for path in (part, other):
        path.mkdir(parents=True)
        (path / "run.wandb").write_text("points")
    (tmp_path / "wandb" / "latest-run").symlink_to(part)
    package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert (folder / "attempts" / "wandb" / part.name / "run.wandb").read_text() == "points"
    assert not part.exists()
    assert other.exists()


def test_a_run_that_is_run_over_is_not_taken_for_whole(package, tmp_path, monkeypatch):
    """The ledger goes on over attempts: the second one here, of the same length, never came to W&B."""
    package()
    monkeypatch.setattr(run_module, "_a_job_ran", False)
    words = ["name=n", "wandb.mode=offline", f"paths.outputs={tmp_path}"]
    assert run(compose([*SMALL_RUN, *words]), sweep=True) == 0
    (folder,) = tmp_path.glob("sweeps/n/*")
    first = ledger_of(folder)
    package(init=ConnectionError("gone"))  # and an id that W&B may have begun is known
    monkeypatch.setattr(run_module, "_a_job_ran", False)
    assert run(compose([*SMALL_RUN, *words, "rerun=all"]), sweep=True) == 0
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    replaced = late.given()["config"]["replaces"]
    assert (replaced[0], len(replaced)) == (first.id, 2)


def test_values_that_are_not_finite_come_back_as_such(package, tmp_path):
    folder = trained(tmp_path, "wandb.mode=disabled")
    lines = recorded(folder)
    lines[0] |= {
        "train/loss": None,
        "train/grad_norm": None,
        "nonfinite": {"train/loss": "nan", "train/grad_norm": "inf"},
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    first = late.lines()[0]
    assert first["train/loss"] != first["train/loss"]
    assert first["train/grad_norm"] == float("inf")
    assert "nonfinite" not in first


def test_log_points_of_an_earlier_version_get_their_time_from_the_run_s_start(package, tmp_path):
    folder = trained(tmp_path, "wandb.mode=disabled")
    lines = recorded(folder)
    for line in lines:
        del line["perf/unix_s"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    started = json.loads((folder / "status.json").read_text())["started"]
    assert [line["_timestamp"] for line in late.lines()] == [started + line["perf/elapsed_s"] for line in lines]


# --- extras ---------------------------------------------------------------------------------------


def test_extras_of_a_run_and_of_one_mirrored_later(package, tmp_path):
    live = package()
    words = ["wandb.extras=[memory,op_map,config,checkpoint,alert]", "trainer.checkpoint_every=2", "probe.memory=true"]
    folder = trained(tmp_path, "wandb.mode=offline", *words)
    tables = {
        name: value for line in live.lines() for name, value in line.items() if name in ("memory_at_peak", "op_map")
    }
    memory = json.loads((folder / "result.json").read_text())["memory"]
    assert tables["memory_at_peak"]["data"] == [
        [memory["phase"], kind, nbytes / 2**20] for kind, nbytes in memory["by_kind"].items()
    ]
    ops = tables["op_map"]
    assert {row[ops["columns"].index("op")] for row in ops["data"]} >= {"addmm", "relu"}
    assert all(row[0] == "cpu" for row in ops["data"])
    last = max(path.name for path in folder.glob("checkpoints/step_*.pt"))
    files = [args for name, args, _ in live.calls if name == "artifact"]
    assert files == [("config", "config.yaml"), ("checkpoint", last)]
    assert "alert" not in live.names()
    late = package()
    wish = Wish(WandbMode.offline, extras=[Extra.config, Extra.op_map], again=True)
    assert kinds([tmp_path], wish) == ["mirrored"]
    assert [args for name, args, _ in late.calls if name == "artifact"] == [("config", "config.yaml")]
    assert late.lines()[-1]["op_map"] == ops


def test_an_alert_is_given_when_it_happens_and_not_later(package, tmp_path):
    live = package()
    words = ["wandb.extras=[alert]", "optimizer.lr=1e30", "wandb.mode=offline"]
    folder = trained(tmp_path, *words)
    assert json.loads((folder / "result.json").read_text())["status"] == "diverged"
    (alert,) = [args for name, args, _ in live.calls if name == "alert"]
    assert alert[0].endswith(": diverged")
    late = package()
    assert kinds([tmp_path], Wish(WandbMode.offline, again=True)) == ["mirrored"]
    assert "alert" not in late.names()


# --- what is left alone ---------------------------------------------------------------------------


def test_a_run_that_is_going_on_is_left_alone(tmp_path):
    folder = trained(tmp_path, "wandb.mode=disabled")
    hold = (
        "import fcntl, sys, time; log = open(sys.argv[1], 'ab'); fcntl.lockf(log, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, folder / "train.log"], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        (outcome,) = refill([tmp_path], OFFLINE)
        other.kill()
    assert outcome.kind == "left out"
    assert outcome.text.startswith("is being run, or mirrored (")
    assert not (folder / "wandb.json").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("result.json", '{"status": "completed", "arm": "fp32", "memory": {"by_kind": 3}}'),
        ("result.json", '{"status": "completed", "summary": [1]}'),
        ("config.yaml", "model: ["),
        ("config.yaml", "a: 1"),
        ("environment.json", "{}"),
        ("environment.json", "[]"),
        ("config.yaml", None),
    ],
)
def test_a_folder_that_does_not_tell_what_was_run_is_named(package, tmp_path, file, text):
    stand_in = package()
    folder = trained(tmp_path, "wandb.mode=disabled")
    kill(folder)
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    (outcome,) = refill([tmp_path], OFFLINE)
    assert (outcome.kind, stand_in.begun) == ("left out", 0)
    assert outcome.text.startswith("its files do not tell what was run (")


def test_what_is_damaged_in_a_folder_is_no_traceback(package, tmp_path):
    package()
    folder = trained(tmp_path, "wandb.mode=disabled", "wandb.extras=[op_map]")
    rows = [
        b"\xff\xfe",
        b"null",
        b'{"train/step": 5, "nonfinite": 3, "perf/elapsed_s": "x"}',
        b'{"train/step": 7, "train/loss"',
    ]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(rows))
    (folder / "probe" / "op_map.json").write_text('{"columns": ["a", "b"], "rows": [[1]]}')
    (folder / "wandb.json").write_text('{"id": "a", "replaces": "bc"}')
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert [line["train/step"] for line in late.lines()] == [5]
    assert late.given()["config"]["replaces"] == []
    (folder / "train.log").unlink()
    (folder / "train.log").mkdir()
    (outcome,) = refill([tmp_path], OFFLINE)
    assert (outcome.kind, "train.log is not a file" in outcome.text) == ("left out", True)


def test_the_id_is_known_before_w_and_b_begins(package, tmp_path, monkeypatch):
    """Whenever it is stopped: the next one takes the place of what was begun."""
    stand_in = package()
    folder = trained(tmp_path, "wandb.mode=disabled")

    def killed(**given):
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in, "init", killed)
    with pytest.raises(KeyboardInterrupt):
        kinds([tmp_path])
    begun = ledger_of(folder)
    assert (bool(begun.id), begun.whole) == (True, False)
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    assert late.given()["config"]["replaces"] == [begun.id]


def test_what_is_told_of_a_run_is_not_of_the_machine_that_mirrors_it(package, tmp_path):
    folder = trained(tmp_path, "wandb.mode=disabled")
    result = json.loads((folder / "result.json").read_text()) | {"host": "elsewhere"}
    (folder / "result.json").write_text(json.dumps(result))
    late = package()
    assert kinds([tmp_path]) == ["mirrored"]
    settings = late.calls[0][2]["settings"]
    assert (settings["host"], settings["disable_git"], settings["x_disable_stats"]) == ("elsewhere", True, True)


def test_a_folder_reached_twice_is_mirrored_once_and_one_without_a_ledger_not_at_all(package, tmp_path):
    folder = trained(tmp_path / "there", "wandb.mode=disabled")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    package()
    assert kinds([tmp_path / "link", tmp_path / "there"], Wish(WandbMode.offline, again=True)) == ["mirrored"]
    (folder / "wandb.json").unlink()
    (folder / "wandb.json").mkdir()  # cannot be written
    stand_in = package()
    (outcome,) = refill([tmp_path], Wish(WandbMode.offline, again=True))
    assert (outcome.kind, stand_in.begun) == ("left out", 0)
    assert "wandb.json cannot be written" in outcome.text


def test_it_ends_where_w_and_b_fails(package, tmp_path):
    for seed in range(3):
        trained(tmp_path, "wandb.mode=disabled", f"seed={seed}")
    package(init=ConnectionError("unreachable"))
    assert kinds([tmp_path], Wish(WandbMode.online)) == ["degraded"] * 2  # it is not the folder, after two


def test_a_folder_that_is_none():
    with pytest.raises(InputError, match="nowhere is not a folder; name one that holds runs"):
        kinds([Path("nowhere")])


def script(*words, **environment):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "mirror.py"), *map(str, words)],
        env=inherited | {"PYTHONPATH": str(ROOT / "src")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--mode", "disabled"], {}, "W&B's mode disabled makes no run; valid here are offline and online"),
        ([], {"WANDB_MODE": "disabled"}, "W&B's mode disabled makes no run"),
        (
            ["--extras", "memory,opmap"],
            {},
            "--extras opmap is none; valid are memory, op_map, config, checkpoint, alert.",
        ),
        (["--project", "a/b"], {}, "is no name of a project"),
    ],
)
def test_wrong_words_are_answered(tmp_path, words, environment, said):
    (tmp_path / "run").mkdir()
    done = script(tmp_path, *words, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# --- a sweep, with W&B's own files ----------------------------------------------------------------


def records(log):
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_w_and_b(outputs):
    """What W&B's files hold: the history of each run, by its name."""
    found = {}
    for log in outputs.glob("wandb/*run-2*/run-*.wandb"):
        told = records(log)
        names = [record["run"]["display_name"] for record in told if record["type"] == "run"]
        items = [record["history"]["item"] for record in told if record["type"] == "history"]
        if names:  # one killed early has an empty file
            found.setdefault(names[0], []).extend(items)
    return found


def start(outputs, *words, mode="offline"):
    own = ["experiment=smoke", "device=cpu", "device.threads=1", "trainer.steps=6000", "trainer.log_every=20"]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "-m", *own, "probe.memory=false", f"paths.outputs={outputs}", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": mode},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_sweep_with_killed_jobs_and_a_disabled_one_gets_whole(tmp_path):
    with start(tmp_path, "precision=fp32,bf16") as sweep:
        killed = set()
        while sweep.poll() is None:
            time.sleep(0.05)
            for metrics in set(tmp_path.glob("sweeps/smoke/*/metrics.jsonl")) - killed:
                if len(metrics.read_bytes().splitlines()) > 25:
                    os.kill(json.loads((metrics.parent / "status.json").read_text())["pid"], signal.SIGKILL)
                    killed.add(metrics)
    assert len(killed) == 2
    with start(tmp_path, "precision=fp32", "seed=1", "trainer.steps=200", mode="disabled") as sweep:
        pass
    folders = sorted(path.parent for path in tmp_path.glob("sweeps/smoke/*/metrics.jsonl"))
    assert len(folders) == 3
    before = in_w_and_b(tmp_path)
    assert [len(before.get(folder.name, [])) < len(recorded(folder)) for folder in folders] == [True] * 3
    assert re.search(r"^3 mirrored$", script(tmp_path).stdout, re.MULTILINE)
    after = in_w_and_b(tmp_path)
    assert set(after) == {folder.name for folder in folders}
    for folder in folders:
        items = after[folder.name]
        assert [{key: item[key] for key in item if key[0] != "_"} for item in items] == recorded(folder)
        assert [item["_timestamp"] for item in items] == [line["perf/unix_s"] for line in recorded(folder)]
    assert script(tmp_path).stdout == "3 whole before\n"
    assert in_w_and_b(tmp_path) == after
