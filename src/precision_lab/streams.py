"""Text that may be lost: where a log's disk is full or a reader has gone, what is printed is dropped.

Nothing raises and nothing is tried again at the end, so that no run stops, or ends with another exit code, for
want of a line of words.
"""

import io
from pathlib import Path


class _Dropping(io.FileIO):
    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def lossy(
    file: Path | int, encoding: str = "utf-8", kind: type[io.TextIOWrapper] = io.TextIOWrapper
) -> io.TextIOWrapper:
    """A stream to the end of a file, or to a file descriptor that stays open. OSError from opening alone."""
    raw = _Dropping(file, "w" if isinstance(file, int) else "a", closefd=not isinstance(file, int))
    return kind(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)
