"""A question put to a process of its own."""

import os
import signal
import sys

import pytest

from precision_lab.errors import Ended, InputError
from precision_lab.processes import Killed, ask

HERE = f"{__name__}:"


def doubled(order):
    print("a model prints what it likes")
    return {"doubled": 2 * order, "path": sys.path}


def refuses(order):
    raise InputError(f"{order} is not possible.")


def fails(order):
    raise ValueError(order)


def kills_itself(order):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_answer_is_free_of_what_is_printed_and_the_path_is_the_askers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert ask(HERE + "doubled", 21) == {"doubled": 42, "path": sys.path}


@pytest.mark.parametrize(("name", "code", "said"), [("refuses", 2, "x is not possible."), ("fails", 1, "ValueError")])
def test_what_failed_said_why_and_ends_the_asker_alike(capfd, name, code, said):
    with pytest.raises(Ended) as end:
        ask(HERE + name, "x")
    assert end.value.code == code
    assert said in capfd.readouterr().err


def test_a_process_that_was_killed_is_told_by_the_signal():
    with pytest.raises(Killed) as end:
        ask(HERE + "kills_itself", None)
    assert end.value.number == signal.SIGKILL
