"""`check=true`: what it says, against the run that it speaks of; and what it leaves, which is nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch

from precision_lab import check as check_module
from precision_lab import run as run_module
from precision_lab.assemble import assemble, resolve
from precision_lab.check import check, look
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.sizes import GIB
from precision_lab.terminal import CHECK_FILE, CHECKED
from test_fitting import OWN, gib_between

FIXED = ["device=cpu", "device.threads=1", "meter.warmup_steps=2"]
MLP = ["model=mlp", "model.hidden=[32]", "trainer.batch_size=16", "trainer.steps=6"]
SMALL = {
    "mlp": MLP,
    "cnn": ["model=cnn", "model.widths=[8,16]", "trainer.batch_size=8"],
    "gpt": [
        *("model=gpt", "dataset=synthetic_tokens", "model.layers=2", "model.width=32", "model.context=32"),
        "trainer.batch_size=4",
    ],
    "resnet18": ["model=resnet18", "dataset=synthetic_images", "trainer.batch_size=2"],
}


def outlook_of(*words):
    resolved = resolve(compose([*words, *FIXED]))
    return look(assemble(resolved), resolved)


def measured_by_a_run(tmp_path, *words):
    """The peak of a run in bytes."""
    asked = compose([*words, *FIXED, "trainer.steps=3", f"paths.outputs={tmp_path}", "wandb.mode=disabled"])
    assert run_module.run(asked) == 0
    (path,) = tmp_path.glob("runs/*/*/result.json")
    return json.loads(path.read_text())["summary"]["final/mem_peak_allocated_gib"] * GIB


def test_what_it_says_and_that_it_leaves_nothing(tmp_path, capsys):
    words = [*MLP, "precision=fp32", "trainer.accumulation=2", f"paths.outputs={tmp_path}"]
    assert check(compose([*words, *FIXED])) == 0
    _, title, plan, time, peak, disk, last = capsys.readouterr().out.splitlines()
    assert title == "fp32: mlp on digits, seed 0"
    assert last == f"{title}: the input is right; {CHECKED}"
    parameters = 64 * 32 + 32 + 32 * 10 + 10
    expected = "6 steps of 32 samples in 2 micro-batches, of 1,438 to train on and 359 to validate"
    assert plan.strip() == f"{expected}; {parameters:,} parameters"
    assert time.endswith(" ms a step, the median of 5 after the first: an indication and no benchmark")
    assert " MiB of memory at the peak of a step, in the " in peak
    assert float(disk.split()[0]) == pytest.approx(3 * 4 * parameters / 2**20, rel=0.01)  # AdamW keeps two more
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_the_run_s(tmp_path, precision):
    words = [*MLP, f"precision={precision}"]
    found = outlook_of(*words)
    assert found.peak_bytes == pytest.approx(measured_by_a_run(tmp_path, *words), rel=0.05)
    assert (found.steady, found.timed_steps, found.out_of_memory) == (True, 5, None)


def test_no_step_begins_after_the_limit(monkeypatch, capsys):
    monkeypatch.setattr(check_module, "LIMIT_S", 0.0)
    found = outlook_of(*MLP, "precision=fp32")
    assert (found.timed_steps, found.steady) == (0, False)
    assert found.step_ms > 0
    assert check(compose([*MLP, "precision=fp32", *FIXED])) == 0
    out = capsys.readouterr().out
    assert " s for the first step, which warms up; no other was timed" in out
    assert "  at least " in out


def test_what_would_run_out_of_memory_says_what_fits(capsys):
    words = ["model=cnn", "trainer.batch_size=64", "precision=fp32"]
    assert check(compose([*words, *FIXED, f"device.memory_budget_gib={gib_between(32, 64, *words)}"])) == 0
    out = capsys.readouterr().out
    assert "  out of memory in the " in out
    assert "a batch of 32 fits: trainer.batch_size=32 trainer.accumulation=2 keeps the step" in out
    assert "of memory at the peak" not in out
    assert out.endswith(f"seed 0: a step does not fit into memory; {CHECKED}\n")


def test_a_model_that_breaks_is_told_with_its_place():
    words = [*OWN, "model._target_=own_code.mine.Raises", "trainer.batch_size=8", *FIXED]
    sentence = r"^A step raised ValueError: the third gear is missing \(.*mine\.py, line \d+\)\.$"
    with pytest.raises(InputError, match=sentence):
        check(compose(words))


def test_a_folder_gets_what_was_found(tmp_path):
    assert check(compose([*MLP, "precision=fp32", *FIXED]), tmp_path) == 0
    found = json.loads((tmp_path / CHECK_FILE).read_text())
    assert found["peak_bytes"] > 0
    assert found["phase"] in ("forward", "backward", "optimizer")


def test_a_compiled_model_has_a_peak_without_a_phase(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)  # what is taken is the same way without it
    found = outlook_of(*MLP, "precision=fp32", "device.compile=true")
    assert found.phase is None
    assert found.peak_bytes == pytest.approx(outlook_of(*MLP, "precision=fp32").peak_bytes, rel=0.05)


@pytest.mark.slow
def test_a_sweep_shows_what_each_job_needs(tmp_path):
    words = [*MLP, *FIXED, "precision=fp32,bf16", "check=true", f"paths.outputs={tmp_path}"]
    line = [sys.executable, str(ROOT / "train.py"), "-m", *words]
    here = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stderr
    rows = [row.split() for row in done.stdout.splitlines() if row.startswith("precision=")]
    assert [(row[0], row[1]) for row in rows] == [("precision=fp32", "checked"), ("precision=bf16", "checked")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and row[4] == "MiB" for row in rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", SMALL)
def test_the_peak_is_the_run_s_within_five_per_cent(tmp_path, model, precision):
    words = [*SMALL[model], f"precision={precision}"]
    found, measured = outlook_of(*words), measured_by_a_run(tmp_path, *words)
    print(f"{model} {precision}: {found.peak_bytes / 2**20:.3f} MiB of {measured / 2**20:.3f}, {found.phase}")
    assert found.peak_bytes == pytest.approx(measured, rel=0.05)
