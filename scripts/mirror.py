"""Turn run folders into W&B runs, later: what was made with W&B disabled, degraded, or was killed on the way.

python scripts/mirror.py                              every run and benchmark in outputs that W&B does not have whole
python scripts/mirror.py outputs/sweeps/demo --mode online

The same names, steps and times; a second time adds nothing. A run that is still going is left alone.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from precision_lab.config import ROOT, Extra, WandbConfig, WandbMode
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError
from precision_lab.redaction import redact, secrets_in
from precision_lab.tracking.refill import Wish, refill

MODES = (WandbMode.offline.name, WandbMode.online.name)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run folders turned into W&B runs.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="where runs lie (default: outputs)")
    parser.add_argument("--mode", metavar="MODE", help="offline: local files, for make sync; online (default: offline)")
    parser.add_argument("--project", metavar="NAME", help="instead of the one in each run's config")
    parser.add_argument("--extras", metavar="LIST", help=f"instead of the run's: of {','.join(Extra.__members__)}")
    parser.add_argument("--again", action="store_true", help="those that W&B has whole, too: its files may be gone")
    asked = parser.parse_args(words)
    return exit_code(lambda: mirror(asked.folders or [ROOT / "outputs"], wish_of(asked)))


def wish_of(asked: argparse.Namespace) -> Wish:
    mode = asked.mode or os.environ.get("WANDB_MODE") or MODES[0]
    if mode not in MODES:
        raise InputError(f"W&B's mode {mode} makes no run; valid here are {' and '.join(MODES)}: --mode offline.")
    names = None if asked.extras is None else [name.strip() for name in asked.extras.split(",") if name.strip()]
    unknown = [name for name in names or [] if name not in Extra.__members__]
    if unknown:
        raise InputError(f"--extras {unknown[0]} is none; valid are {', '.join(Extra.__members__)}.")
    extras = None if names is None else [Extra[name] for name in names]
    project = redact(asked.project, secrets_in(os.environ, words=sys.argv))
    if project is not None:
        WandbConfig(WandbMode[mode], project, None, [])  # which says what is wrong with it
    return Wish(WandbMode[mode], project, extras, asked.again)


def mirror(tops: list[Path], wish: Wish) -> int:
    counts: Counter[str] = Counter()
    for outcome in refill(tops, wish):
        counts[outcome.kind] += 1
        if outcome.kind != "whole before":
            print(f"{outcome.kind}: {os.path.relpath(outcome.folder)}\n  {outcome.text}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no run here")
    return 1 if counts["degraded"] else 0


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(main(sys.argv[1:]))
