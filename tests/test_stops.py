"""Signals to stop: raised where the run can say so, held back while its files are written."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from precision_lab import stops as stops_module
from precision_lab.config import ROOT
from precision_lab.errors import InputError
from precision_lab.recorder import metrics_of
from precision_lab.stops import HURRY_S, Stops, Terminated, stop_when_closed


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("name", "word"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP")])
def test_a_signal_waits_for_the_folder_and_then_raises(name, word):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Stops() as stops:
        send(number)  # while the folder is made
        with pytest.raises(Terminated, match=f"^{word}$"):
            stops.release()
        stops.hold()
        send(number)  # while the result is written
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("name", "word"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP")])
def test_a_signal_raises_at_once_and_a_second_one_does_not(name, word):
    with Stops() as stops:
        stops.release()
        with pytest.raises(Terminated, match=f"^{word}$"):
            send(getattr(signal, name))
        send(signal.SIGINT)  # while the first one is on its way
        with pytest.raises(Terminated, match=f"^{word}$"):
            stops.check()


def test_the_end_of_the_one_who_started_it_stops_a_run(monkeypatch):
    monkeypatch.setattr(stops_module, "_orphaned", threading.Event())
    end, held = os.pipe()
    with Stops() as stops:
        stops.release()
        stop_when_closed(end)
        os.write(held, b"any")  # is no end
        threading.Timer(0.05, os.close, [held]).start()
        with pytest.raises(Terminated, match=r"^the sweep that started it is gone$"):
            time.sleep(5)
    os.close(end)


def test_a_signal_that_was_swallowed_is_raised_at_the_next_log_point():
    with Stops() as stops:
        stops.release()
        with contextlib.suppress(BaseException):  # as a finaliser or a hook at a fork would
            send(signal.SIGTERM)
        with pytest.raises(Terminated, match=r"^SIGTERM$"):
            stops.check()


def test_within_a_step_a_signal_waits_and_one_of_a_sweep_right_after_it_too():
    with Stops() as stops:
        stops.release()
        with stops.waiting_for_the_step():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert stops.arrived
            with pytest.raises(Terminated, match="^SIGTERM$") as caught:
                stops.check()
    assert not caught.value.in_a_step


def test_a_signal_from_somebody_who_does_not_want_to_wait_raises_within_the_step(monkeypatch):
    with Stops() as stops:
        stops.release()
        with stops.waiting_for_the_step():
            os.kill(os.getpid(), signal.SIGINT)
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + HURRY_S + 0.1)
            with pytest.raises(Terminated, match="^Ctrl-C$") as caught:
                os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.in_a_step


def test_sigusr1_asks_for_a_checkpoint_and_stops_nothing():
    before = signal.getsignal(signal.SIGUSR1)
    with Stops() as stops:
        stops.release()
        assert not stops.checkpoint_asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops.checkpoint_asked
        assert not stops.arrived
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stops() as stops:
            stops.release()
            send(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("metrics", [{"m": "x"}, {"m": ("x", "up")}, {"m": 3}, ["m"]])
def test_metrics_that_a_task_states_wrongly_are_refused(metrics):
    with pytest.raises(InputError, match=r'^task: metrics must be like {"mae": \("dollars", "lower"\)}'):
        metrics_of(type("Task", (), {"metrics": metrics}))


END = """
import atexit, os, signal
from precision_lab import stops

stops.ignore_signals_at_exit()
{}
def send():
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)

"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        # pytest's own hooks aside, this is what comes last: a module's end, when handlers are gone
        ("class Last:\n    def __del__(self): send()\nlast = Last()", 0),
        ("stops.ignore_checkpoint_signal(); stops.end_at_once(3); atexit.register(send)", 3),
        ("stops.ignore_checkpoint_signal(); atexit.register(send)", -signal.SIGTERM),  # it hangs, and is ended
    ],
)
def test_at_its_end_a_process_takes_no_harm_from_a_signal_and_can_be_ended_where_it_hangs(ends, code):
    done = subprocess.run(
        [sys.executable, "-c", END.format("") + ends], env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, timeout=60
    )
    assert done.returncode == code
