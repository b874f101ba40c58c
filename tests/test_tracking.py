"""The W&B mirror: absent when disabled, one warning when it fails, readable when offline, and no secret in it."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from precision_lab.config import ROOT, WandbConfig, WandbMode, compose
from precision_lab.run import run
from precision_lab.tracking import mirror as tracking
from precision_lab.tracking.mirror import Mirror

INIT = dict(name="mlp_digits_bf16_s0_cpu_01234567", group="g", job_type="train", tags=["bf16"], config={"seed": 0})
LOCAL_FILES = "what was written is complete"


def asked(mode):
    return WandbConfig(WandbMode[mode], "precision-lab", None, [])


class Wandb:
    """A stand-in for the package: records every call, and fails where it is told to."""

    Settings = staticmethod(lambda **settings: settings)
    id, url = "an-id", None

    def __init__(self, fails=()):
        self.fails, self.calls = fails, []
        self.summary = SimpleNamespace(update=lambda values: self._call("summary", values))

    def _call(self, name, /, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        if name in self.fails:
            raise self.fails[name]

    def init(self, **kwargs):
        self._call("init", **kwargs)
        return self

    def log(self, values):
        self._call("log", values)

    def define_metric(self, *args, **kwargs):
        self._call("define_metric", *args, **kwargs)

    def finish(self, **kwargs):
        self._call("finish", **kwargs)

    def teardown(self):
        self._call("teardown")

    def names(self):
        return [name for name, _, _ in self.calls]


@pytest.fixture
def wandb(monkeypatch):
    """Put the stand-in in the package's place."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def install(**fails):
        stand_in = Wandb(fails)
        monkeypatch.setitem(sys.modules, "wandb", stand_in)
        return stand_in

    return install


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "precision_lab")
    monkeypatch.setattr(logging.getLogger("precision_lab"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- disabled ------------------------------------------------------------------------------------


def test_disabled_never_imports_wandb(monkeypatch, tmp_path, warnings_of):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    mirror = Mirror(asked("disabled"), tmp_path / "wandb", **INIT)
    mirror.log({"train/loss": 1.0})
    mirror.finish("completed", None, {})
    assert mirror.state == "disabled"
    assert warnings_of() == []
    assert not (tmp_path / "wandb").exists()
    assert Mirror(asked("offline"), tmp_path, **INIT).state == "degraded"  # the control: here it is imported


def test_loading_the_module_does_not_load_wandb(tmp_path):
    code = (
        "import sys; from pathlib import Path; from precision_lab.tracking.mirror import *; "
        f"Mirror(WandbConfig(WandbMode.disabled, 'p', None, []), Path({str(tmp_path)!r})); "
        "sys.exit(bool({'wandb', 'torch'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


def test_a_whole_disabled_run_never_imports_wandb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(compose(SMALL_RUN + ["wandb.mode=disabled", f"paths.outputs={tmp_path}"])) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert status(tmp_path)["wandb"] == "disabled"


# --- what it hands over ------------------------------------------------------------------------------


def test_what_wandb_is_given(wandb, tmp_path):
    stand_in = wandb()
    mirror = Mirror(asked("offline"), tmp_path / "outputs", **INIT)
    mirror.log({"train/step": 50, "train/loss": 0.5, "perf/unix_s": 7.5})
    mirror.finish("completed", None, {"final/val_loss": 0.25})
    assert stand_in.names() == ["init", "define_metric", "define_metric", "log", "summary", "finish", "teardown"]
    given = stand_in.calls[0][2]
    assert {key: given[key] for key in ("project", "mode", "dir", "name", "group", "tags", "config")} == {
        "project": "precision-lab",
        "mode": "offline",
        "dir": str(tmp_path / "outputs"),
        **{key: INIT[key] for key in ("name", "group", "tags", "config")},
    }
    assert given["reinit"] == "finish_previous"  # else a second run in one process would be the first's
    settings, patience = given["settings"], tracking.PATIENCE
    assert settings["login_timeout"] + settings["init_timeout"] < patience["init"]  # W&B's own words come first
    assert settings["finish_timeout"] < patience["finish"]
    assert settings["finish_timeout_raises"] is True  # else a run that was not handed over would look as if it were
    assert sum(tracking.PATIENCE[what] for what in ("init", "finish", "teardown")) <= 30
    assert stand_in.calls[1] == ("define_metric", ("*",), {"step_metric": "train/step", "step_sync": False})
    line = {"train/step": 50, "train/loss": 0.5, "perf/unix_s": 7.5, "_timestamp": 7.5}
    assert stand_in.calls[3] == ("log", (line,), {})  # no step=
    assert stand_in.calls[4][1][0] == {"final/val_loss": 0.25, "status": "completed", "reason": ""}
    assert (mirror.state, mirror.id, mirror.url) == ("offline", "an-id", None)


def test_an_empty_mode_of_the_environment_is_none(wandb, tmp_path, monkeypatch):
    stand_in = wandb()
    monkeypatch.setenv("WANDB_MODE", "")
    stand_in.Settings = lambda **settings: (
        pytest.fail("W&B would refuse it") if "WANDB_MODE" in os.environ else settings
    )
    assert Mirror(asked("offline"), tmp_path, **INIT).state == "offline"


def test_a_tag_that_wandb_would_refuse_the_run_for_is_cut(wandb, tmp_path):
    stand_in = wandb()
    Mirror(asked("offline"), tmp_path, **INIT | {"tags": ["t" * 65, "", "bf16", "t" * 66, "t" * 64 + "u"]})
    assert stand_in.calls[0][2]["tags"] == ["t" * 64, "bf16"]


def test_two_attempts_have_two_ids(wandb, tmp_path, monkeypatch):
    """Later, in another process, or on another machine: each alone makes another id."""
    stand_in = wandb()
    attempts = [("here", 7, 255), ("here", 7, 256), ("here", 8, 255), ("there", 7, 255)]
    for node, pid, milliseconds in attempts:
        monkeypatch.setattr(tracking.platform, "node", lambda node=node: node)
        monkeypatch.setattr(tracking.os, "getpid", lambda pid=pid: pid)
        monkeypatch.setattr(tracking.time, "time_ns", lambda now=milliseconds: now * 1_000_000 + 1)
        Mirror(asked("offline"), tmp_path, **INIT | {"name": INIT["name"] + "x" * 200})
    ids = [kwargs["id"] for name, _, kwargs in stand_in.calls if name == "init"]
    assert len(set(ids)) == len(attempts)
    parts = [re.fullmatch(r"(.*)-([0-9a-f]+)([0-9a-f]{4})", one).groups() for one in ids]
    assert [time for _, time, _ in parts] == ["ff", "100", "ff", "ff"]
    assert parts[0][2] == parts[1][2]
    assert all(
        name.startswith(INIT["name"]) and len(one) <= 128 - 11 for one, (name, *_) in zip(ids, parts, strict=True)
    )


@pytest.mark.parametrize(
    ("status", "code"), [("completed", 0), ("failed", 1), ("interrupted", 1), ("out_of_memory", 1), ("diverged", 1)]
)
def test_the_end_of_a_run_is_told(wandb, tmp_path, status, code):
    stand_in = wandb()
    Mirror(asked("offline"), tmp_path, **INIT).finish(status, "why", {})
    assert stand_in.calls[-3:] == [
        ("summary", ({"status": status, "reason": "why"},), {}),
        ("finish", (), {"exit_code": code}),
        ("teardown", (), {}),
    ]


def test_values_logged_are_a_copy(wandb, tmp_path):
    stand_in = wandb()
    values = {"train/loss": 1.0, "perf/unix_s": 3.0}
    Mirror(asked("offline"), tmp_path, **INIT).log(values)
    assert stand_in.calls[-1][1][0] == values | {"_timestamp": 3.0}
    assert "_timestamp" not in values


def test_every_call_is_made_in_one_thread_beside_the_run_s(wandb, tmp_path, monkeypatch):
    stand_in = wandb()
    threads = []
    monkeypatch.setattr(stand_in, "_call", lambda *_, **__: threads.append(threading.current_thread()))
    mirror = Mirror(asked("offline"), tmp_path, **INIT)
    mirror.log({})
    mirror.finish("completed", None, {})
    assert len(threads) == 7
    (thread,) = set(threads)
    assert thread is not threading.current_thread()
    thread.join(5)
    assert not thread.is_alive()  # it ends with the mirror


def test_log_points_are_handed_over_together_each_with_its_time(wandb, tmp_path, monkeypatch):
    """W&B's process sleeps between two of them, and to wake it costs more than to tell it."""
    stand_in, now = wandb(), [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    mirror = Mirror(asked("offline"), tmp_path, **INIT)

    def log(step):
        mirror.log({"train/step": step, "perf/unix_s": 1e9 + step})

    def sent():
        lines = [args[0] for name, args, _ in stand_in.calls if name == "log"]
        assert all(line["_timestamp"] == line["perf/unix_s"] == 1e9 + line["train/step"] for line in lines)
        return [line["train/step"] for line in lines]

    for now[0] in (100.0, 103.0, 109.9):
        log(now[0])
    assert sent() == [100.0]  # the first at once: a run is seen to have begun
    now[0] = 110.0
    log(110.0)
    assert sent() == [100.0, 103.0, 109.9, 110.0]
    for now[0] in range(111, 111 + tracking.SEND_AT):
        log(now[0])
        now[0] = 111.5  # no time passes
    assert len(sent()) == 4 + tracking.SEND_AT
    log(7)
    mirror.finish("completed", None, {})
    assert sent()[-1] == 7
    assert stand_in.names()[-4:] == ["log", "summary", "finish", "teardown"]


# --- failing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["init", "define_metric", "log", "summary", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no server\nsecond line"), OSError("disk full"), SystemExit("")])
def test_a_failure_is_one_warning_and_then_silence(wandb, tmp_path, warnings_of, where, error):
    stand_in = wandb(**{where: error})
    mirror = Mirror(asked("online"), tmp_path, **INIT)
    for step in range(3):
        mirror.log({"train/step": step})
    mirror.finish("completed", None, {})
    mirror.finish("completed", None, {})
    assert mirror.state == "degraded"
    assert stand_in.names().count(where) == 1
    assert stand_in.names()[-2:] == [where, "teardown"]  # else W&B would wait for its server at the process's end
    (warning,) = warnings_of()
    assert type(error).__name__ in warning
    assert str(error).split("\n")[0] in warning
    assert "second line" not in warning
    assert LOCAL_FILES in warning


@pytest.mark.parametrize("hanging", ["init", "define_metric", "log", "finish", "teardown", "init teardown"])
def test_a_call_that_hangs_is_left_behind(wandb, tmp_path, monkeypatch, warnings_of, hanging):
    stand_in = wandb()
    patience = {"init": 0.21, "log": 0.22, "finish": 0.23, "teardown": 0.24, "file": 0.25}
    assert set(patience) == set(tracking.PATIENCE)
    monkeypatch.setattr(tracking, "PATIENCE", patience)
    over, begun = threading.Event(), []

    def hang(which, *_, **__):
        begun.append(which)
        over.wait(30)

    for which in hanging.split():
        monkeypatch.setattr(stand_in, which, partial(hang, which))
    start = time.monotonic()
    mirror = Mirror(asked("online"), tmp_path, **INIT)
    for step in range(3):
        mirror.log({"train/step": step})
    mirror.finish("completed", None, {})
    mirror.finish("completed", None, {})
    took, calls = time.monotonic() - start, stand_in.names() + begun
    over.set()
    assert took < 2  # the call's patience, and that of the teardown if it hangs too
    assert mirror.state == "degraded"
    (warning,) = warnings_of()
    what = {"define_metric": "init", "teardown": "finish"}.get(hanging, hanging.split()[0])
    assert f"(TimeoutError: no answer to {what} in {patience[what]} s)" in warning
    assert LOCAL_FILES in warning
    assert calls.count("teardown") == (2 if hanging == "teardown" else 1)
    assert [calls.count(one) for one in ("init", "log", "finish")] == {
        **dict.fromkeys(("init", "define_metric", "init teardown"), [1, 0, 0]),
        "log": [1, 1, 0],
        **dict.fromkeys(("finish", "teardown"), [1, 3, 1]),
    }[hanging]


def test_a_call_that_hangs_does_not_keep_the_process(tmp_path):
    (tmp_path / "wandb.py").write_text(
        "import time\nSettings = dict\ndef init(**_): time.sleep(60)\ndef teardown(): time.sleep(60)\n"
    )
    code = (
        "from pathlib import Path; from precision_lab.tracking import mirror as tracking; "
        "tracking.PATIENCE = dict.fromkeys(tracking.PATIENCE, 0.1); "
        "asked = tracking.WandbConfig(tracking.WandbMode.online, 'p', None, []); "
        f"print(tracking.Mirror(asked, Path({str(tmp_path / 'outputs')!r}), name='n').state)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "degraded\n")
    assert "no answer to init in 0.1 s" in done.stderr


def test_what_wandb_exits_with_is_not_the_runs_exit(wandb, tmp_path, warnings_of):
    """Neither of a teardown after all went well, nor of the one after a failure."""
    stand_in = wandb(teardown=SystemExit(3))
    mirror = Mirror(asked("online"), tmp_path, **INIT)
    mirror.finish("completed", None, {})
    assert mirror.state == "degraded"
    assert stand_in.names()[-3:] == ["finish", "teardown", "teardown"]
    (warning,) = warnings_of()
    assert "(SystemExit: 3)" in warning
    wandb(log=OSError("disk full"), teardown=SystemExit(3))
    mirror = Mirror(asked("online"), tmp_path, **INIT)
    mirror.log({})
    assert mirror.state == "degraded"
    assert "(OSError: disk full)" in warnings_of()[1]


def test_a_folder_that_cannot_be_made_is_a_failure_too(wandb, tmp_path, warnings_of):
    wandb()
    (tmp_path / "file").write_text("")
    assert Mirror(asked("offline"), tmp_path / "file" / "wandb", **INIT).state == "degraded"
    assert len(warnings_of()) == 1


def test_ctrl_c_passes_through(wandb, tmp_path):
    stand_in = wandb(log=KeyboardInterrupt())
    mirror = Mirror(asked("offline"), tmp_path, **INIT)
    with pytest.raises(KeyboardInterrupt):
        mirror.log({})
    mirror.finish("interrupted", "Ctrl-C", {})  # and what was logged is handed over all the same
    assert mirror.state == "offline"
    assert stand_in.names()[-3:] == ["summary", "finish", "teardown"]


SMALL_RUN = [
    *("experiment=smoke", "precision=fp32", "device=cpu", "trainer.steps=4", "trainer.log_every=2"),
    *("meter.warmup_steps=1", "model.hidden=[4]", "trainer.batch_size=8", "probe.memory=false"),
]


def status(outputs):
    (path,) = outputs.glob("runs/*/*/status.json")
    return json.loads(path.read_text())


def losses(outputs):
    (path,) = outputs.glob("runs/*/*/metrics.jsonl")
    return [(line["train/step"], line["train/loss"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("where", ["init", "log", "finish", "teardown"])
def test_training_goes_on_without_wandb(wandb, tmp_path, where):
    stand_in = wandb()
    assert run(compose([*SMALL_RUN, "wandb.mode=online", f"paths.outputs={tmp_path}/good"])) == 0
    assert stand_in.names().count("log") == 2
    assert status(tmp_path / "good")["wandb"] == "online"
    wandb(**{where: ConnectionError("unreachable")})
    assert run(compose([*SMALL_RUN, "wandb.mode=online", f"paths.outputs={tmp_path}/bad"])) == 0
    state = status(tmp_path / "bad")
    assert (state["status"], state["wandb"]) == ("completed", "degraded")
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")
    assert [step for step, _ in losses(tmp_path / "bad")] == [2, 4]
    (text,) = [path.read_text() for path in (tmp_path / "bad").glob("runs/*/*/train.log")]
    assert text.count("W&B stopped (ConnectionError: unreachable)") == 1


# --- the real package, offline ---------------------------------------------------------------------------------


def train(outputs, *words, **environment):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *SMALL_RUN, *words, f"paths.outputs={outputs}"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "offline"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout + done.stderr


def inspect(path, *options):
    words = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_an_offline_run_is_read_back(tmp_path):
    train(tmp_path)
    assert status(tmp_path)["wandb"] == "offline"
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    summary = json.loads(inspect(log, "--summary"))
    text = json.dumps(summary)
    (result,) = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/result.json")]
    values = summary["summary"]
    assert values["status"] == "completed"
    for name, value in result["summary"].items():
        if value is not None and name != "nonfinite":
            assert values[name] == pytest.approx(value, rel=1e-12), name
    for key in ("precision", "model", "dataset", "device_name", "seed", "compile", "torch_version", "git_sha"):
        assert key in summary["config"], text[:500]
    history = [json.loads(line) for line in inspect(log).splitlines() if '"history"' in line]
    assert len(history) == 2


@pytest.mark.slow
def test_no_secret_is_written_anywhere(tmp_path):
    """Through every door a secret has: a variable resolved in the config, and an argument under a telling name."""
    (tmp_path / "mine.py").write_text(
        "from precision_lab.models import MLP\n"
        "def net(api_key, **arguments):\n    return MLP(num_classes=10, channels=1, image_size=8, hidden=[4])\n"
    )
    variable, argument = "hunter2-0123456789abcdef", "correct-horse-battery"
    output = train(
        *(tmp_path / "outputs", "name=${oc.env:MY_API_KEY}", "tags=[${oc.env:MY_API_KEY}]"),
        *("wandb.group=${oc.env:MY_API_KEY}", "model._target_=mine.net", f"+model.api_key={argument}"),
        MY_API_KEY=variable,
        PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(tmp_path)]),
    )
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (variable, argument):
        assert [path.name for path in files if secret.encode() in path.read_bytes()] == [], secret
        assert secret not in output
