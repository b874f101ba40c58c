"""The input of a sweep's jobs, tried before the first one starts."""

import os
import subprocess
import sys
import time

import pytest

from precision_lab import folders
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.sweep import survey as survey_module
from precision_lab.sweep import trial
from precision_lab.sweep.plan import Answer, Job, settle
from precision_lab.sweep.trial import wrong_input

FIXED = ["device=cpu", "device.threads=1"]
MLP = ["model=mlp", "model.hidden=[16]", "precision=fp32"]
OWN = ["model=custom", "dataset=custom", "dataset._target_=theirs.data", "task=custom", "task._target_=theirs.task"]
OWN += ["trainer.batch_size=8", "precision=fp32"]
THEIRS = """
import os, sys, time, torch
from torch.utils.data import TensorDataset

def data(notes=None, n=64, seconds=0):
    if notes:
        open(notes, "a").write("data\\n")
    time.sleep(seconds)
    return TensorDataset(torch.ones(n, 2), torch.ones(n, 1)), TensorDataset(torch.ones(4, 2), torch.ones(4, 1))

def task(model, batch):
    return model(batch[0]).mean(), {}

class Net(torch.nn.Linear):
    def __init__(self, ends="well"):
        super().__init__(2, 1)
        if ends == "raises":
            raise TypeError("not on a Monday")
        if ends == "refuses":
            from precision_lab.errors import InputError
            raise InputError("model: not on a Monday.")
        if ends == "exits":
            sys.exit(0)
        if ends == "crashes":
            os._exit(3)
        if ends == "hangs":
            time.sleep(60)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    folder = tmp_path / "their_code"
    folder.mkdir()
    (folder / "theirs.py").write_text(THEIRS)
    (folder / "broken.py").write_text("raise RuntimeError('half written')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    return folder


def told(*jobs):
    return wrong_input([compose([*words, *FIXED]) for words in jobs])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.batch_size=2000"], "trainer.batch_size=2000 is larger than the training set: choose at most 1438."),
        (["trainer.steps=null", "trainer.epochs=1", "trainer.accumulation=500"], "trainer.epochs=1 of 1438 samples"),
        (
            ["precision=bf16", "precision.fp32_modules=[nose]"],
            "precision.fp32_modules: no module's name matches 'nose'",
        ),
        (["model._target_=no.such.Thing"], "model._target_=no.such.Thing cannot be loaded"),
        (["model._target_=torch.nn.Linear"], "model: torch.nn.Linear refused its arguments: "),
        (["scheduler=custom", "scheduler._target_=math.sqrt"], "scheduler"),
    ],
)
def test_what_is_wrong_is_said_of_the_job_it_is_wrong_with(words, sentence):
    good, bad, after = told(MLP, [*MLP, *words], [*MLP, "seed=1"])
    assert (good, after) == ("", "")
    assert bad.startswith(sentence)


@pytest.mark.parametrize("ends", ["raises", "exits", "crashes"])
def test_what_a_users_code_does_is_left_to_the_job(theirs, ends):
    """And the jobs after it are tried all the same."""
    words = [*OWN, "model._target_=theirs.Net"]
    found = told([*words, f"+model.ends={ends}"], [*words, "trainer.batch_size=100"], [*words, "+model.ends=refuses"])
    assert found[0] == ""
    assert found[1] == "trainer.batch_size=100 is larger than the training set: choose at most 64."
    assert found[2] == "model: not on a Monday."


def test_a_module_that_breaks_on_import_is_left_to_the_job_and_a_name_it_lacks_is_not(theirs):
    found = told([*OWN, "model._target_=broken.Net"], [*OWN, "model._target_=theirs.Nett"])
    assert found[0] == ""
    assert found[1].startswith("model._target_=theirs.Nett cannot be loaded")


def test_what_takes_too_long_is_left_to_the_job(theirs, monkeypatch):
    monkeypatch.setattr(trial, "LIMIT_S", 3.0)
    words = [*OWN, "model._target_=theirs.Net"]
    began = time.monotonic()
    assert told([*words, "+model.ends=hangs"], [*words, "+model.ends=refuses"]) == ["", "model: not on a Monday."]
    assert time.monotonic() - began < 30


def test_jobs_of_the_same_data_read_it_once(theirs, tmp_path):
    words = [*OWN, "model._target_=theirs.Net", f"+dataset.notes={tmp_path / 'notes'}"]
    jobs = [[*words, f"precision={arm}", f"seed={seed}"] for arm in ("fp32", "bf16", "bf16_pure") for seed in (0, 1)]
    assert told(*jobs) == [""] * 6
    assert (tmp_path / "notes").read_text() == "data\n"
    told(*jobs, [*jobs[0], "+dataset.n=32"])
    assert (tmp_path / "notes").read_text() == "data\n" * 3


def test_data_that_takes_too_long_to_read_is_read_once_and_left_to_the_jobs(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "LIMIT_S", 2.0)
    words = [*OWN, "model._target_=theirs.Net", f"+dataset.notes={tmp_path / 'notes'}", "+dataset.seconds=600"]
    assert told(*([*words, f"optimizer.lr={lr}"] for lr in (0.1, 0.2, 0.3))) == [""] * 3
    assert (tmp_path / "notes").read_text() == "data\n"


def test_data_that_is_wrong_is_said_of_all_its_jobs_and_a_model_that_is_wrong_of_none_but_its_own(theirs):
    lost = [*OWN, "model._target_=theirs.Net", "dataset._target_=theirs.lost"]
    found = told([*lost, "optimizer.lr=0.1"], [*lost, "optimizer.lr=0.2"])
    assert found[0].startswith("dataset._target_=theirs.lost cannot be loaded")
    assert found[1] == found[0]
    first, second = told([*OWN, "model._target_=theirs.Nett"], [*OWN, "model._target_=theirs.Net"])
    assert (first.startswith("model._target_=theirs.Nett cannot be loaded"), second) == (True, "")


# --- what becomes of it --------------------------------------------------------------------------------------


def settled(tmp_path, sentences, *words):
    asked = [compose([*MLP, *FIXED, f"seed={n}", f"paths.outputs={tmp_path}", *words]) for n in range(len(sentences))]
    jobs = [Job([f"seed={n}"], f"seed={n}", one) for n, one in enumerate(asked)]
    answers = [
        Answer(precision=one.precision, device="cpu", wrong=words) for one, words in zip(asked, sentences, strict=True)
    ]
    return settle(jobs, answers)


def test_every_sentence_is_told_with_the_titles_of_its_jobs(tmp_path):
    with pytest.raises(InputError) as error:
        settled(tmp_path, ["", "This is wrong.", "That is.", *["This is wrong."] * 3])
    assert str(error.value) == "seed=1; seed=3; seed=4 and 1 more: This is wrong.\nseed=2: That is."


def test_a_check_leaves_it_to_its_jobs(tmp_path):
    assert settled(tmp_path, ["This is wrong."], "check=true") == []


def test_finished_jobs_and_those_of_an_unsupported_arm_are_not_tried(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "wrong_input", lambda jobs: tried.extend(jobs) or ["This is wrong."] * len(jobs))
    monkeypatch.setattr(
        folders, "finished", lambda folder, rerun, print: "completed" if "_s1_" in folder.name else None
    )
    fixed = [*MLP, *FIXED, "on_unsupported=skip", f"paths.outputs={tmp_path}"]
    jobs = [compose([*fixed, "seed=0"]), compose([*fixed, "seed=1"]), compose([*fixed, "precision=tf32"])]
    answers = [survey_module._answer(one, 1) for one in jobs]
    assert answers[2].refused
    found = survey_module._with_wrong_input(jobs, answers)
    assert [one.seed for one in tried] == [0]
    assert [one.wrong for one in found] == ["This is wrong.", "", ""]


def test_a_sweep_with_wrong_input_runs_nothing(theirs, tmp_path):
    words = [*OWN, "model._target_=theirs.Net", "+model.ends=well,crashes", "trainer.batch_size=8,100"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "-m", *words, *FIXED, f"paths.outputs={tmp_path / 'outputs'}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(theirs)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    titles = "trainer.batch_size=100 +model.ends=well; trainer.batch_size=100 +model.ends=crashes"
    sentence = "trainer.batch_size=100 is larger than the training set: choose at most 64."
    assert done.stderr.splitlines() == [f"precision-lab: {titles}: {sentence}"]
    assert not (tmp_path / "outputs").exists()
