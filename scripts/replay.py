"""Take one step of a run again, exactly, and see where it went wrong.

    python scripts/replay.py run=outputs/runs/2026-01-31/12-00-00-000000_gpt_... [step=137]

Restores the nearest checkpoint, or begins at the start, replays the same batches and random states up to that step, and
shows its loss, its gradient norm, the samples of its batch and the first module whose output was not finite. Without
step= it is the first non-finite one. Writes nothing. Exit code 3 if something was found, 0 if all of it was finite.
"""

import re
import sys
from pathlib import Path

from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError
from precision_lab.identity import title
from precision_lab.run_folder import config_of, nonfinite_step


def main(words: list[str]) -> int:
    given = dict(word.partition("=")[::2] for word in words)
    if not given.get("run") or set(given) - {"run", "step"} or len(given) < len(words):
        raise InputError("Write run=DIR, a run's folder, and step=K or nothing for the first non-finite step.")
    step = given.get("step")
    if step is not None and not re.fullmatch(r"[1-9]\d{0,17}", step, re.ASCII):
        raise InputError(f"step={step} is not valid; it must be a whole number from 1 on.")
    folder = Path(given["run"])
    asked = config_of(folder)
    first, last = (int(step), int(step)) if step else nonfinite_step(folder)
    from precision_lab.replay import lines, replay  # torch comes in here

    done = replay(folder, asked, first, last)
    print(*lines(done, title(done.asked)), sep="\n")
    return 3 if done.look.nonfinite else 0


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
