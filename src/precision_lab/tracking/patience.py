"""Calls that may hang, and are then left behind: W&B's own time limits do not hold everywhere. No torch, no wandb."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Worker:
    """Does one call at a time in a thread of its own, so that one that hangs can be left behind."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="wandb").start()

    def _work(self) -> None:
        while call := self._calls.get():
            action, done = call
            try:
                done.set_result(action())
            except BaseException as error:  # Ctrl-C too belongs to the one who waits
                done.set_exception(error)

    def do(self, action: Callable[[], None], seconds: float) -> None:
        """Return or raise as the action does; TimeoutError if that takes longer."""
        done: Future = Future()
        self._calls.put((action, done))
        done.result(timeout=seconds)

    def end(self) -> None:
        """No more calls; does not wait for one that hangs."""
        self._calls.put(None)
