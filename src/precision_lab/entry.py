"""From what a process is to do to its exit code and its words. No torch."""

import os
import sys
import traceback
from collections.abc import Callable

from precision_lab.errors import InputError
from precision_lab.recorder import CannotWrite
from precision_lab.redaction import redact, secrets_in
from precision_lab.streams import lossy

_NAME = "precision-lab: "
LONGEST = 400  # characters of what is said of wrong input


def exit_code(action: Callable[[], int]) -> int:
    """The action's own exit code; 2 and a sentence for wrong input, 130 for Ctrl-C, else 1."""
    try:
        return action()
    except InputError as error:
        return refuse(error)
    except CannotWrite as error:
        print(redact(f"precision-lab: {error}", secrets_in(os.environ)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the run had a folder to say so in
        return 130
    except Exception:  # not the user's: shown whole
        print(redact(traceback.format_exc(), secrets_in(os.environ)), end="", file=sys.stderr)
        return 1


def refuse(error: InputError | str) -> int:
    """Say what is wrong with the input; return its exit code."""
    secrets = secrets_in(os.environ, words=sys.argv)
    lines = error.args if isinstance(error, InputError) else (error,)
    shown = [_legible(redact(f"{_NAME}{line}", secrets)) for line in lines]  # a line that is an override is a secret
    print("\n".join([*shown[:1], *(line.removeprefix(_NAME) for line in shown[1:])]), file=sys.stderr)
    return 2


def _legible(line: str) -> str:
    """On one line and without its middle where that is long: a value may be anything."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
    head, tail = LONGEST * 5 // 8, LONGEST * 3 // 8 - len(" ... ")
    return shown if len(shown) <= LONGEST else f"{shown[:head]} ... {shown[-tail:]}"


def print_what_can_be() -> None:
    """What stdout or stderr cannot take is dropped, letters and all: a result is in its files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, lossy(stream.fileno(), stream.encoding))
