"""Signals to stop a run, and the end of the process that started it. No torch."""

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HURRY_S = 2.0  # a second signal later than this is from somebody who does not want to wait; sooner, from a sweep
_orphaned = threading.Event()


@contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP go to `handler`, but for those that are ignored: nohup means it."""
    before = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Terminated(BaseException):
    """A signal to stop arrived. Not an Exception, so that no handler between mistakes it for a failure.

    `in_a_step`: it did not wait for the step to end, so that the state is one of no use.
    """

    def __init__(self, reason: str, in_a_step: bool = False):
        super().__init__(reason)
        self.in_a_step = in_a_step


class Stops:
    """SIGINT, SIGTERM and SIGHUP, raised as Terminated where the run can say so, and held back elsewhere.

    Held at first, while the folder is made, and again while the result is written. A signal raises
    once: a second one, from the terminal and the sweep both, would break into what ends the run.
    SIGUSR1 stops nothing: it asks for a checkpoint.
    """

    def __init__(self) -> None:
        self._handling = handled_by(self._handle)
        self._arrived: str | None = None
        self._arrived_at = math.inf
        self._held = True
        self._patient = False
        self.checkpoint_asked = False

    def __enter__(self) -> "Stops":
        self._handling.__enter__()
        self._usr1_before = signal.signal(signal.SIGUSR1, self._ask_for_a_checkpoint)
        return self

    def __exit__(self, *failure: Any) -> None:
        signal.signal(signal.SIGUSR1, self._usr1_before)
        self._handling.__exit__(*failure)

    def _ask_for_a_checkpoint(self, number: int, frame: Any) -> None:
        self.checkpoint_asked = True

    def _handle(self, number: int, frame: Any) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._arrived = self._arrived or ("the sweep that started it is gone" if _orphaned.is_set() else name)
        self._arrived_at = min(self._arrived_at, time.monotonic())
        in_a_hurry = time.monotonic() - self._arrived_at > HURRY_S
        if not self._held and (in_a_hurry or not self._patient):
            self._held = True
            raise Terminated(self._arrived, in_a_step=self._patient)

    @property
    def arrived(self) -> bool:
        """Whether a signal to stop has arrived."""
        return self._arrived is not None

    @contextmanager
    def waiting_for_the_step(self) -> Iterator[None]:
        """Within, a signal waits for `check`, unless another one comes after HURRY_S, and breaks into what is done."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def check(self) -> None:
        """Raise Terminated if a signal arrived: one may have been raised where exceptions are swallowed."""
        if self._arrived:
            self._held = True
            raise Terminated(self._arrived)

    def release(self) -> None:
        """From now on a signal raises."""
        self._held = False
        self.check()

    def hold(self) -> None:
        """From now on a signal waits, for ever if nobody asks."""
        self._held = True


def ignore_checkpoint_signal() -> None:
    """SIGUSR1, which would end the process, does nothing until a run has something to save. No child inherits this."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)


def ignore_signals_at_exit() -> None:
    """Have signals ignored while the interpreter takes itself apart, which gives them back their meaning before.

    To be called first of all: what is registered first comes last at the exit, and what hangs before can be ended.
    """

    def ignore() -> None:
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


def end_at_once(code: int) -> None:
    """All is written: from here on a signal to stop ends the process at once, with the exit code that it has earned."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(code))


def stop_when_closed(pipe: int) -> None:
    """Stop this process, as SIGTERM would, once nobody holds the other end of the file descriptor `pipe`."""

    def wait() -> None:
        while os.read(pipe, 4096):  # os.read: a lock of sys.stdin's would be inherited by a forked data worker
            pass
        _orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="parent").start()
