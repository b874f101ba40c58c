"""The scripts as a person runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from typed_scripts import module, run

ROOT = Path(__file__).parents[1]


def test_the_demo_sweeps_compares_and_says_it_in_sentences_and_runs_nothing_twice(tmp_path):
    words = ["experiment=smoke", "precision=fp32,bf16", "seed=0,1", "trainer.steps=40", "model.hidden=[256,256]"]
    words += [f"paths.outputs={tmp_path}", "++name=night shift", "budget_s=1"]
    first = run("demo.py", *words)
    assert first.returncode == 0, first.stderr
    sweep = tmp_path / "sweeps" / "night-shift"
    results = {path: path.read_bytes() for path in sweep.glob("*/result.json")}
    assert len(results) == 4
    lines = first.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if re.match("arm +runs", line))
    assert [line.split()[:3] for line in lines[header + 1 : header + 3]] == [
        ["fp32", "2", "completed"], ["bf16", "2", "completed"]
    ]  # fmt: skip
    assert max(map(len, lines[header:-2])) <= 80
    assert lines[-1] == f"the page: {sweep}/report.html"
    assert (sweep / "report.html").is_file()
    text = " ".join(first.stdout.split())
    assert re.search(
        r"On this \S.*? units?, .*\. Of what fp32 keeps for backward, bf16 kept 0\.5\d; .*\. After 40 steps", text
    )
    compared = json.loads((sweep / "comparison.json").read_text())["comparisons"]
    assert [arm["seeds"] for one in compared for arm in one["arms"]] == [[0, 1], [0, 1]]
    assert compared[0]["arms"][1]["against_reference"]["saved_ratio"]["mean"] < 0.7
    assert compared[0]["arms"][1]["timing"]["ratio"]["pairs"] >= 3  # one a sitting at least
    assert "timed in alternation, bf16 ran at" in text
    timed = list(sweep.glob("benchmarks/*"))
    second = run("demo.py", *words)
    assert second.returncode == 0
    assert list(sweep.glob("benchmarks/*")) == timed
    assert "4 of 4 jobs had been run before" in second.stdout
    assert {path: path.read_bytes() for path in sweep.glob("*/result.json")} == results


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["precision=tf32", "device=cpu"], "precision=tf32 needs tf32"),
        (["experiment=none"], "experiment=none does not exist"),
        (["trainer.stepz=5"], "trainer.stepz is not a known key"),
        (["--help"], "--help is no override; the demo takes those of train.py, such as seed=0 or name=mine."),
    ],
)
def test_the_demo_passes_a_refusal_on(tmp_path, words, sentence):
    done = run("demo.py", *words, f"paths.outputs={tmp_path}")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_demo_of_which_a_job_fails_compares_the_others_and_a_check_compares_nothing(tmp_path):
    words = ["experiment=smoke", "precision=fp32", "seed=0", f"paths.outputs={tmp_path}"]
    checked = run("demo.py", *words, "check=true")
    assert (checked.returncode, "1 checked" in checked.stdout) == (0, True)
    done = run("demo.py", *words[:2], "seed=0,1", words[3], "trainer.steps=12", "trainer.batch_size=64,100000")
    assert done.returncode == 1
    assert re.search(r"^fp32 +2 completed", done.stdout, re.MULTILINE)
    assert re.search(r"^fp32 +2 failed", done.stdout, re.MULTILINE)


def test_the_demo_finds_the_modules_that_train_py_finds(monkeypatch):
    """The folder of the script comes first on the path, and a sweep hands the path on to its jobs."""
    demo = module("demo.py")
    seen = []

    def run_path(path, run_name):
        seen.append((path, run_name, *sys.argv, sys.path[0]))

    monkeypatch.setattr(demo.runpy, "run_path", run_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["scripts", *sys.path])
    assert demo._run("train.py", "-m", "seed=0") == 0
    train = str(ROOT / "train.py")
    assert seen == [(train, "__main__", train, "-m", "seed=0", str(ROOT))]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_demo_ends_the_sweep_which_says_what_is_left(tmp_path, number, code):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    words = ["experiment=smoke", "precision=fp32,bf16", "trainer.steps=100000", f"paths.outputs={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("sweeps/smoke/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "12 of 12 jobs are left; the same command runs them." in out
    assert "Traceback" not in err
    (status,) = tmp_path.glob("sweeps/smoke/*/status.json")
    assert json.loads(status.read_text())["status"] == "interrupted"


@pytest.mark.parametrize("by", ["operation", "module"])
def test_inspect_ops_prints_dtypes_by_operation_or_module(by, tmp_path):
    words = ["model=mlp", "model.hidden=[8]", "precision=bf16", "device=cpu", f"paths.outputs={tmp_path}"]
    done = run("inspect_ops.py", *words, f"by={by}", "target=cuda")
    assert done.returncode == 0, done.stderr
    *lines, written = done.stdout.splitlines()
    assert Path(written.removeprefix("written: ")).name == "ops_cuda.json"
    assert max(map(len, lines)) <= 80
    addmm = [line.split() for line in lines if "addmm" in line]
    assert len(addmm) >= 1
    assert all(line[-5:-2] == ["bfloat16", "->", "bfloat16"] for line in addmm)  # then FLOPs, such as `4.1 k`
    if by == "module":
        assert [line[:3] for line in addmm] == [["forward", "addmm", "1"]] * 2
        above = [lines[i - 1] for i, line in enumerate(lines) if "addmm" in line]
        assert above == ["layers.0.0", "head"]
    else:
        assert [line[:3] for line in addmm] == [["forward", "addmm", "2"]]
    assert any("_log_softmax" in line and line.split()[-4:-1] == ["float32", "->", "float32"] for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["by=layer"], "by=layer is unknown; valid are operation and module."),
        (["target=tpu"], "target=tpu is unknown; valid are cpu, cuda and mps."),
        (["precision=bf17"], "precision=bf17 does not exist; did you mean bf16?"),
        (["device.compile=true"], "A compiled model cannot be looked at operation by operation"),
    ],
)
def test_inspect_ops_refuses_in_one_sentence(words, sentence):
    done = run("inspect_ops.py", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"precision-lab: {sentence}")
    assert "Traceback" not in done.stderr
