"""One job's process: takes its config from the sweep that started it, and ends when that one is gone."""

import io
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from precision_lab.config import Config, as_values
from precision_lab.entry import exit_code
from precision_lab.redaction import redact, secrets_in
from precision_lab.stops import end_at_once, ignore_checkpoint_signal, ignore_signals_at_exit, stop_when_closed
from precision_lab.streams import lossy


@dataclass(frozen=True)
class Order:
    """What a job's process is given at its stdin."""

    asked: Config
    path: list[str]  # sys.path, so that a `_target_` is found as in a run by itself
    command: list[str]  # the command that would run this job by itself
    folder: Path  # for what a check finds
    asked_at: float  # seconds since 1970


class _Redacted(io.TextIOWrapper):
    """What the job prints goes into its log, as far as the disk takes it, and a secret does not."""

    secrets: list[str]

    def write(self, text: str) -> int:
        return super().write(redact(text, self.secrets))


def main() -> None:
    """Run the job and end with its exit code."""
    ignore_signals_at_exit()
    ignore_checkpoint_signal()
    order: Order = pickle.load(os.fdopen(0, "rb", closefd=False))
    sys.path[:], sys.argv = order.path, order.command
    secrets = secrets_in(os.environ, as_values(order.asked), order.command)
    sys.stdout = sys.__stdout__ = _redacting(sys.stdout, secrets)
    sys.stderr = sys.__stderr__ = _redacting(sys.stderr, secrets)
    _follow_the_sweep()

    def run_it() -> int:
        if order.asked.check:
            from precision_lab.check import check

            return check(order.asked, order.folder)
        from precision_lab.run import run

        return run(order.asked, sweep=True, asked_at=order.asked_at)

    code = exit_code(run_it)
    end_at_once(code)
    sys.exit(code)


def _redacting(stream: TextIO, secrets: list[str]) -> TextIO:
    wrapped = lossy(stream.fileno(), kind=_Redacted)
    wrapped.secrets = secrets
    return wrapped


def _follow_the_sweep() -> None:
    """The sweep holds the other end of stdin as long as it lives."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a prompt gets no answer instead of the pipe
    os.close(nothing)
    stop_when_closed(pipe)
