"""Finished runs that the same command would not make again today: other code, other settings. Results are made up."""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest

from precision_lab import config, folders, identity
from precision_lab.code import code_of
from precision_lab.config import as_values
from precision_lab.sweep.earlier import what_differs
from precision_lab.sweep.plan import Job

WORDS = ["experiment=smoke", "precision=fp32"]


@cache
def composed():
    return config.compose([*WORDS, "name=made-up"])


def job(outputs, seed=0, before=False, **optimizer):
    asked = composed()
    paths = replace(asked.paths, outputs=str(outputs))
    asked = replace(asked, seed=seed, paths=paths, optimizer={**asked.optimizer, **optimizer})
    folder = folders.job_folder(asked, "cpu")
    status = "completed" if before else "waiting"
    return Job([*WORDS, f"seed={seed}"], f"seed={seed}", asked, folder, status=status, before=before)


def finish(one, **changed):
    """Write what the job would have left, with a note that it is made up."""
    result = {
        "note": "made up",
        "status": "completed",
        "overrides": one.overrides,
        "arm": identity.arm_label(one.asked.precision),
        "seed": one.asked.seed,
        "run_signature": identity.run_signature(one.asked),
        "finished": 1.0,
        "config": as_values(one.asked),
        "code": code_of(one.asked),
    }
    one.folder.mkdir(parents=True, exist_ok=True)
    (one.folder / "result.json").write_text(json.dumps(result | changed))
    return one


def test_the_same_code_and_settings_are_no_news(tmp_path):
    done = finish(job(tmp_path, before=True))
    assert what_differs([done, job(tmp_path, seed=1)]) == []


def test_other_code_is_named_in_one_line(tmp_path):
    then = {"precision_lab": "00000000"}
    done = [finish(job(tmp_path, seed, before=True), code=then) for seed in range(3)]
    now = code_of(done[0].asked)["precision_lab"]
    fine = finish(job(tmp_path, 3, before=True))
    assert what_differs([*done, fine]) == [
        f"3 finished jobs were run with other code (precision_lab 00000000, now {now}); rerun=all runs them again."
    ]


def test_code_that_was_not_recorded_and_a_file_that_is_no_more(tmp_path):
    now = code_of(job(tmp_path).asked)["precision_lab"]
    unknown, gone = job(tmp_path, 0, before=True), job(tmp_path, 1, before=True)
    finish(unknown, code=None)
    (line,) = what_differs([unknown])
    assert line.startswith(
        f"1 finished job was run with other code (precision_lab missing, now {now}); rerun=all runs it"
    )
    finish(gone, code={"precision_lab": now, "model": "12345678"})
    assert "(model 12345678, now missing)" in what_differs([gone])[0]


def test_a_job_that_waits_is_not_asked_for_its_code(tmp_path):
    again = finish(job(tmp_path), code={"precision_lab": "00000000"})
    assert what_differs([again]) == []


def test_a_changed_default_is_named_with_its_values_once_for_all_jobs(tmp_path):
    for seed in range(2):
        finish(job(tmp_path, seed, lr=0.5, nesterov=True))
    (line,) = what_differs([job(tmp_path, seed) for seed in range(3)])
    assert line == (
        f"2 jobs were run before by the same command with other settings (optimizer.lr 0.5, now "
        f"{composed().optimizer['lr']}; optimizer.nesterov True, now missing), and will be run anew."
    )


def test_the_newest_of_several_earlier_runs_is_compared(tmp_path):
    finish(job(tmp_path, lr=0.5), finished=5.0)
    finish(job(tmp_path, lr=0.25), finished=7.0)
    finish(job(tmp_path, lr=0.125), finished=6.0)
    (line,) = what_differs([job(tmp_path)])
    assert "optimizer.lr 0.25, now" in line


@pytest.mark.parametrize(
    "changed",
    [
        {"overrides": [*WORDS, "seed=0", "optimizer.lr=0.5"]},  # by choice
        {"seed": 1},
        {"arm": "bf16"},
        {"status": "failed"},
        {"overrides": [1]},
        {"config": None},
        {"finished": "yesterday"},
    ],
)
def test_what_is_not_the_same_command_or_not_whole_is_no_news(tmp_path, changed):
    finish(job(tmp_path, lr=0.5), **changed)
    assert what_differs([job(tmp_path)]) == []


def test_what_a_sweep_is_told_to_do_is_no_other_command(tmp_path):
    finish(job(tmp_path, lr=0.5), overrides=["rerun=failed", *WORDS, "seed=0"])
    assert len(what_differs([job(tmp_path)])) == 1


def test_an_infinite_value_is_the_same_in_file_and_config(tmp_path):
    """JSON has no infinity: the file holds a word."""
    now = job(tmp_path, clip=float("inf"))
    before = finish(job(tmp_path, clip=float("inf"), lr=0.5))
    stored = json.loads((before.folder / "result.json").read_text().replace("Infinity", '"inf"'))
    (before.folder / "result.json").write_text(json.dumps(stored))
    (line,) = what_differs([now])
    assert "clip" not in line


def test_no_secret_is_told(tmp_path):
    finish(job(tmp_path, api_key="before-0123456789", lr=0.5))
    (line,) = what_differs([job(tmp_path, api_key="after-0123456789")])
    assert "0123456789" not in line


def test_many_differences_are_cut_short(tmp_path):
    finish(job(tmp_path, **{f"a{n}": n for n in range(9)}))
    (line,) = what_differs([job(tmp_path)])
    assert line.count(", now") == 6
    assert "; and 3 more)" in line


def test_an_empty_folder_is_no_news(tmp_path):
    finish(job(tmp_path, lr=0.5))
    shutil.rmtree(tmp_path)
    assert what_differs([job(tmp_path)]) == []
