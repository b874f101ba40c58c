"""The scripts as a person runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *words: str, columns: int = 80) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "disabled", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_the_demo_prints_a_row_for_each_precision(tmp_path):
    words = [
        "experiment=smoke",
        "precision=fp32,bf16",
        "trainer.steps=12",
        "model.hidden=[256,256]",
        f"paths.outputs={tmp_path}",
    ]
    done = run("demo.py", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("precision"))
    rows = [line.split() for line in lines[header + 1 : header + 3]]
    assert [row[:2] for row in rows] == [["fp32", "completed"], ["bf16", "completed"]]
    assert all(0 < float(figure) < 10_000 for row in rows for figure in row[2:])
    assert float(rows[1][-1]) < float(rows[0][-1])  # saved activations
    assert len(list(tmp_path.glob("runs/*/*/result.json"))) == 2
    assert max(map(len, lines)) <= 110  # the machine's line; the table itself:
    assert max(len(line) for line in lines[header:]) <= 88


def test_the_demo_shows_what_a_failed_precision_said(tmp_path):
    done = run("demo.py", "experiment=smoke", "precision=tf32", "device=cpu", f"paths.outputs={tmp_path}")
    assert done.returncode == 2
    assert "precision=tf32 needs tf32" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["operation", "module"])
def test_inspect_ops_prints_dtypes_by_operation_or_module(by):
    done = run("inspect_ops.py", "model=mlp", "model.hidden=[8]", "precision=bf16", "device=cpu", f"by={by}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines[2:])) <= 80
    addmm = [line.split() for line in lines if "addmm" in line]
    assert all(line[-3:] == ["bfloat16", "->", "bfloat16"] for line in addmm)
    if by == "module":
        assert [line[0] for line in addmm] == ["layers.0.0", "head"]
    else:
        assert [line[:3] for line in addmm] == [["forward", "addmm", "2"]]
    assert any("_log_softmax" in line and line.split()[-3:] == ["float32", "->", "float32"] for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["by=layer"], "by=layer is unknown; valid are operation and module."),
        (["precision=bf17"], "precision=bf17 does not exist; did you mean bf16?"),
        (["device.compile=true"], "A compiled model cannot be looked at operation by operation"),
    ],
)
def test_inspect_ops_refuses_in_one_sentence(words, sentence):
    done = run("inspect_ops.py", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"precision-lab: {sentence}")
    assert "Traceback" not in done.stderr
