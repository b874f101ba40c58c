"""Whether this machine's verdicts can be believed: false calls and misses, counted where the truth is known.

python scripts/selfcheck.py tries=5 [budget_s=30] [loss=false] [any override of train.py but precision]

Timing: one arm against itself, and against copies whose steps are delayed by 5 % and by 20 %. Loss: bf16_pure,
which must be called worse than fp32. Exit code 3 where more was missed than the intervals allow.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from precision_lab.arms import arms_of
from precision_lab.config import ROOT
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError
from precision_lab.settings import BenchmarkConfig, SelfcheckConfig, own_settings

MISSED = 3  # the exit code
CONTROL = ["model=mlp", "dataset=digits", "trainer.steps=200", "device.threads=1", "wandb.mode=disabled"]


def main(words: list[str]) -> int:
    settings, others = own_settings(words, SelfcheckConfig, "selfcheck.yaml")
    if not settings.tries and not settings.loss:
        raise InputError("tries=0 and loss=false leave nothing to check.")
    sound = check_timing(settings, others or ["experiment=demo"]) if settings.tries else True
    if settings.loss:
        sound = check_loss() and sound
    return 0 if sound else MISSED


def check_timing(settings: SelfcheckConfig, overrides: list[str]) -> bool:
    """Hold the trials, print each and the count."""
    from precision_lab.benchmark.selfcheck import FOUND_AT_LEAST, Checked, self_check

    def told(checked: Checked) -> None:
        last = {f"delay {share:.0%}": ratios[-1] for share, ratios in checked.delayed.items()}
        copies = " ".join(map(str, checked.copies[-2:]))
        delayed = ", ".join(f"{name} {ratio}" for name, ratio in last.items())
        print(f"trial {len(checked.seconds)}, {checked.seconds[-1]:.0f} s: A/A {copies}, {delayed}", flush=True)

    timing, _ = own_settings([f"budget_s={settings.budget_s}"], BenchmarkConfig, "benchmark.yaml")
    (asked,) = arms_of("fp32", overrides).values()
    checked = self_check(asked, settings.tries, timing, told)
    trials, copies = len(checked.seconds), len(checked.copies)
    print(f"A/A: {checked.false_calls} false calls in {copies} (at most {checked.false_calls_allowed} pass)")
    for share, needed in FOUND_AT_LEAST.items():
        print(f"a delay of {share:.0%}: found in {checked.found(share)} of {trials} (at least {needed:.0%} pass)")
    if checked.untrusted:
        print(
            f"In {checked.untrusted} of {trials} trials the noise floor left 1 out: no verdict would have been given."
        )
    return checked.sound


def check_loss() -> bool:
    """Train fp32 and bf16_pure from six seeds, and see what the comparison says of the second."""
    from precision_lab.report.compare import compare
    from precision_lab.report.loss import losses_of
    from precision_lab.report.read import read

    with tempfile.TemporaryDirectory() as folder:
        words = [*CONTROL, "precision=fp32,bf16_pure", "seed=0,1,2,3,4,5", f"paths.outputs={folder}", "name=control"]
        done = subprocess.run([sys.executable, str(ROOT / "train.py"), "-m", *words], capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"The control of the loss did not run: {done.stderr.strip() or done.stdout.strip()}")
        (one,) = compare(read([Path(folder)]))
    (told,) = losses_of(one).values()
    print(f"loss of bf16_pure, which is known to be worse: called {told.word}")
    return told.word == "worse"


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
