"""A run's own log: the terminal and train.log get the same lines, without secrets. No torch."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from precision_lab.redaction import redact

log = logging.getLogger("precision_lab")


@contextlib.contextmanager
def logging_to(file: TextIO, secrets: list[str]) -> Iterator[None]:
    """The terminal and `file` get the same lines; tracebacks go to `file` alone."""
    written = logging.StreamHandler(file)
    written.setFormatter(_Redacting(secrets, "%(asctime)s %(levelname)s %(message)s"))
    handlers = [written]
    if not _is_stdout(file):  # a sweep keeps what its jobs print in their logs
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(_Redacting(secrets, "%(message)s"))
        screen.addFilter(lambda record: record.exc_info is None)
        handlers.append(screen)
    loggers = [log, logging.getLogger("py.warnings")]
    logging.raiseExceptions = False  # a closed terminal is no reason to print stacks
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.handlers = handlers
        logger.propagate = False
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.handlers = []


def _is_stdout(file: TextIO) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # closed, replaced, or none at all
        return False


class _Redacting(logging.Formatter):
    """An exception may quote a secret."""

    def __init__(self, secrets: list[str], template: str):
        super().__init__(template)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), self._secrets)
