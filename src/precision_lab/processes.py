"""A question put to a process of its own: the order goes to its stdin, the answer comes back as JSON. No torch.

What is printed there goes to stderr. The process stops when the one that asked is gone.
"""

import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from typing import Any

from precision_lab.entry import exit_code
from precision_lab.errors import Ended
from precision_lab.stops import stop_when_closed

CHILD = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]


class Killed(Exception):
    """The process was ended by a signal: by the kernel, perhaps, for want of memory."""

    def __init__(self, number: int):
        super().__init__(f"killed by signal {number}")
        self.number = number


def ask(target: str, order: Any) -> Any:
    """What the function `module:name` answers to the order; raises Killed, or Ended where it failed and said why."""
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        pickle.dump((sys.path, target, order), child.stdin)
        child.stdin.flush()  # and held open to the end: by this the process knows that somebody waits
        answer = child.stdout.read()
        child.wait()
    if child.returncode < 0:
        raise Killed(-child.returncode)
    if child.returncode:
        raise Ended(child.returncode)
    return json.loads(answer)


def serve() -> None:
    """The process: take an order, answer it, and end with an exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a model prints is no part of the answer
    sys.path[:], target, order = pickle.load(os.fdopen(0, "rb", closefd=False))
    stop_when_closed(os.dup(0))
    module, _, name = target.partition(":")

    def answer() -> int:
        json.dump(getattr(import_module(module), name)(order), answers)
        answers.flush()
        return 0

    sys.exit(exit_code(answer))
