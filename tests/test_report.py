"""Runs side by side: one row an arm, arms and hardware kept apart, what cannot be read left out."""

import io
import json

import pytest
from rich.console import Console

from precision_lab.report import results, tables

RESULT = {
    "arm": "fp32",
    "config": {"name": "night"},
    "experiment_signature": "01234567",
    "fingerprint": {"model": "CPU X", "threads": 1},
    "status": "completed",
    "summary": {"final/val_loss_fp32": 0.5, "final/val_accuracy": 0.75, "final/perf_step_ms_p50": 2.0},
}


def put(folder, **values):
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({**RESULT, **values}))


def shown(*folders):
    console = Console(file=io.StringIO(), width=100)
    for table in tables(results(list(folders))):
        console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_row_an_arm_with_mean_and_spread_over_its_runs(tmp_path):
    for seed, loss in enumerate((0.4, 0.6)):
        put(tmp_path / str(seed), summary={**RESULT["summary"], "final/val_loss_fp32": loss})
    put(tmp_path / "bad", status="diverged", summary={})
    title, _, row = shown(tmp_path)
    assert title == ["night", "(01234567)", "on", "CPU", "X"]
    assert row == ["fp32", "2", "completed,", "1", "diverged", "0.5", "0.1414", "0.75", "2", "-"]


def test_arms_that_differ_in_brackets_are_two(tmp_path):
    put(tmp_path / "0", arm="fp16")
    put(tmp_path / "1", arm="fp16[fp32_modules=attn]", config={"name": "na[/b]me"})
    assert [row[0] for row in shown(tmp_path)[2:]] == ["fp16", "fp16[fp32_modules=attn]"]


@pytest.mark.parametrize("other", [{"experiment_signature": "76543210"}, {"fingerprint": {"model": "CPU Y"}}])
def test_other_experiments_and_other_hardware_have_tables_of_their_own(tmp_path, other):
    put(tmp_path / "0")
    put(tmp_path / "1", **other)
    assert len(tables(results([tmp_path]))) == 2


def test_earlier_attempts_and_what_cannot_be_read_are_left_out(tmp_path):
    outputs = tmp_path / "attempts" / "outputs"  # the user's own folder may be called so
    put(outputs / "0")
    put(outputs / "0" / "attempts" / "1", status="failed")
    put(outputs / "1")
    (outputs / "1" / "result.json").write_text('{"arm": ')
    put(outputs / "2")
    (outputs / "2" / "result.json").write_text(json.dumps({k: v for k, v in RESULT.items() if k != "config"}))
    put(outputs / "3", fingerprint=None)
    assert results([outputs]) == [RESULT]
    assert len(results([outputs, outputs / "0"])) == 1  # a folder named twice counts once
