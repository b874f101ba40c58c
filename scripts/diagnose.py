"""What does a precision do to my model's gradient, which module is to blame, and what heals it?

    python scripts/diagnose.py model=gpt dataset=stdlib_text precision=fp16 target=cuda [checkpoint=DIR]

Takes the overrides of train.py, and settings of its own, which are listed in conf/diagnose.yaml. One training step is
taken in float32 and in the arm; where the arm's gradient is hurt, the smallest set of modules or operations that has to
stay in float32 is found, and proved by training. Exit code 0: healthy, 3: a finding.
"""

import shutil
import sys

from precision_lab.config import compose
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.settings import DiagnoseConfig, own_settings


def main(words: list[str]) -> int:
    settings, others = own_settings(words, DiagnoseConfig, "diagnose.yaml")
    asked = compose(others)
    from precision_lab.diagnosis.diagnose import told_and_kept  # torch comes in here

    return 0 if told_and_kept(asked, settings, others, shutil.get_terminal_size().columns) else 3


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
