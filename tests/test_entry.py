"""How a process ends: its exit code, and the words for what went wrong."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from precision_lab import config
from precision_lab.entry import exit_code, refuse
from precision_lab.errors import InputError
from precision_lab.recorder import CannotWrite
from precision_lab.stops import Terminated

SECRET = "wandb-0123456789abcdef"


def raising(error):
    def action():
        raise error

    return action


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
def test_the_action_s_own_code_is_the_process_s(code, capsys):
    assert exit_code(lambda: code) == code
    assert capsys.readouterr() == ("", "")


def test_wrong_input_is_2_and_a_sentence_on_stderr(capsys):
    assert exit_code(raising(InputError("seed is [red] wrong."))) == 2
    assert capsys.readouterr() == ("", "precision-lab: seed is [red] wrong.\n")


@pytest.mark.parametrize("error", [ValueError("two words"), KeyError("a"), MemoryError(), OSError(2, "no")])
def test_what_is_ours_to_mend_is_1_and_shown_whole(error, capsys):
    assert exit_code(raising(error)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback")
    assert "in action" in err
    assert err.rstrip().split("\n")[-1].startswith(type(error).__name__)


def test_a_chain_of_errors_is_shown_from_its_start(capsys):
    def action():
        try:
            raise OSError("the cause")
        except OSError as error:
            raise RuntimeError("the end") from error

    assert exit_code(action) == 1
    err = capsys.readouterr().err
    assert 0 < err.index("the cause") < err.index("the end")


def test_ctrl_c_is_130_without_a_word(capsys):
    assert exit_code(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [SystemExit(5), Terminated("SIGTERM")])
def test_an_end_that_was_meant_goes_through(error):
    with pytest.raises(type(error)) as caught:
        exit_code(raising(error))
    assert caught.value is error


def test_to_refuse_is_2_and_tells_no_secret(capsys):
    assert refuse(f"401 for {SECRET}") == 2
    assert exit_code(raising(InputError(f"401 for {SECRET}"))) == 2
    assert capsys.readouterr().err == "precision-lab: 401 for [redacted]\n" * 2


def test_a_traceback_tells_no_secret_either(capsys):
    exit_code(raising(ValueError(f"401 for {SECRET}")))
    err = capsys.readouterr().err
    assert SECRET not in err
    assert err.endswith("ValueError: 401 for [redacted]\n")


def test_a_sentence_that_quotes_an_override_tells_no_secret(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "+model.hf_token=c2VjcmV0c2VjcmV0Cg=="])
    assert refuse("+model.hf_token=c2VjcmV0c2VjcmV0Cg== cannot be read") == 2
    assert capsys.readouterr().err == "precision-lab: +model.hf_token=[redacted] cannot be read\n"


def test_a_file_that_cannot_be_written_is_1_and_a_sentence(capsys, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert exit_code(raising(CannotWrite(tmp_path / "x", full))) == 1
    assert capsys.readouterr() == ("", f"precision-lab: {tmp_path}/x cannot be written (No space left on device).\n")


def test_ctrl_c_while_hydra_loads_prints_no_stack(tmp_path):
    loading = "import os, time\nopen(os.environ['READY'], 'w').close()\ntime.sleep(30)"
    (tmp_path / "hydra.py").write_text(loading)
    path = os.pathsep.join([str(tmp_path), str(config.ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "READY": str(tmp_path / "ready")}
    words = [sys.executable, str(config.ROOT / "train.py")]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")
