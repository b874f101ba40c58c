"""What the machine says to the jobs of a sweep, asked in a process of its own or on a machine that is made up."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.sweep import survey


@pytest.fixture
def four_gpus(monkeypatch):
    names = ["A100", "T4", "A100", "A100"]
    properties = SimpleNamespace(name="A100", total_memory=80 * 2**30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_jobs_go_to_the_gpus_of_the_first_ones_model(four_gpus):
    answer = survey._answer(compose(["precision=auto", "device=cuda"]), 1)
    assert answer.gpus == (0, 2, 3)
    assert (answer.device, answer.precision.name) == ("cuda", "bf16")
    assert answer.fingerprint["count"] == 1  # a job trains on one of them
    assert any(note.startswith("precision=auto: bf16, since ") for note in answer.notes)


def test_an_answer_for_each_job_from_a_process_of_its_own():
    jobs = [compose(["device=cpu", f"precision={arm}", "device.threads=1"]) for arm in ("fp32", "tf32", "fp32", "auto")]
    first, refused, third, chosen = survey.survey(jobs)
    assert first == third
    assert (first.device, first.gpus, first.fingerprint["threads"]) == ("cpu", (), 1)
    assert refused.refused.startswith("precision=tf32 needs tf32, which this cpu device does not have")
    assert chosen.precision.name in ("fp32", "bf16")


def test_a_torch_that_cannot_be_loaded_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
    with pytest.raises(InputError, match=r"exit code 1\): ImportError: libcudart.so.13 is missing$"):
        survey.survey([compose(["device=cpu"])])


ASK = """
from precision_lab.config import compose
from precision_lab.errors import Ended
from precision_lab.sweep.survey import survey
import sys

try:
    survey([compose(["device=cpu"])])
except Ended as end:
    sys.exit(end.code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_it_quietly_and_nothing_stays_behind(tmp_path, number, code):
    torch = "import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\ntime.sleep(30)"
    (tmp_path / "torch.py").write_text(torch)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "PID": str(tmp_path / "pid")}
    asks = subprocess.Popen([sys.executable, "-c", ASK], env=environment, stderr=subprocess.PIPE)
    end = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    asks.send_signal(number)
    _, err = asks.communicate(timeout=10)
    assert (asks.returncode, err) == (code, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
