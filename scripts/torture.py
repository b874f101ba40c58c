"""Is anything lost where a run is killed? Runs that are killed again and again, against runs that are left alone.

python scripts/torture.py [kills=60] [steps=150] [seed=0] [at_once=2]

A cnn and a gpt in fp32, bf16 and fp16, whose loss scale overflows again and again, on the CPU. Each is killed at random
moments after its first step, some of them while it writes a checkpoint, and told to stop; the same command starts it
again until it completes. Then weights, optimizer state, loss scale, generators, data position and every recorded
number but times, memory and energy must be those of the undisturbed run, bit for bit. Exit code 1 where they are not.
"""

import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError
from precision_lab.settings import TortureConfig, own_settings
from precision_lab.torture import Outcome, cases, torture


def main(words: list[str]) -> int:
    settings, others = own_settings(words, TortureConfig, "torture.yaml")
    if others:
        raise InputError(f"{others[0]} is no setting of this script; valid are kills, steps, seed and at_once.")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, the runs would ignore it, too
    folder, began = Path(tempfile.mkdtemp(prefix="torture-")), time.monotonic()

    def one(case) -> Outcome:
        outcome = torture(case, folder / case.name.replace(" ", "-"), settings.steps, settings.seed)
        print(line(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(settings.at_once) as pool:
        try:
            outcomes = list(pool.map(one, cases(settings.kills, settings.steps)))
        except KeyboardInterrupt:  # which the runs got, too, and end by
            pool.shutdown(cancel_futures=True)
            raise
    kills, inside = sum(one.kills for one in outcomes), sum(one.inside for one in outcomes)
    differ = [one.name for one in outcomes if one.differences]
    told = f"{len(differ)} of {len(outcomes)} runs differ, see {folder}" if differ else "nothing was lost"
    print(f"{kills} kills, {inside} of them inside a checkpoint's write, in {time.monotonic() - began:.0f} s: {told}")
    if not differ:
        shutil.rmtree(folder)
    return 1 if differ else 0


def line(outcome: Outcome) -> str:
    ends = ", ".join([f"{outcome.kills} kills, {outcome.inside} inside a write", *outcome.stops])
    shown = outcome.differences[:5] + [f"{len(outcome.differences) - 5} more"] * (len(outcome.differences) > 5)
    found = "".join(f"\n    {difference}" for difference in shown) or " equal bit for bit"
    return f"{outcome.name}: {ends}; {outcome.skipped} steps skipped, {outcome.seconds:.0f} s:{found}"


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
