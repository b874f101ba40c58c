"""What does a precision do to my model's gradient, which module is to blame, and what heals it?

    python scripts/diagnose.py model=gpt dataset=stdlib_text precision=fp16 target=cuda [checkpoint=DIR]

Takes the overrides of train.py, and settings of its own, which are listed in conf/diagnose.yaml. One training step is
taken in float32 and in the arm; where the arm's gradient is hurt, the smallest set of modules or operations that has to
stay in float32 is found, and proved by training. Exit code 0: healthy, 3: a finding.
"""

import json
import os
import shutil
import sys

from precision_lab.config import as_values, compose
from precision_lab.diagnosis.words import lines, markdown
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.folders import timed_folder
from precision_lab.recorder import storable, write_whole
from precision_lab.redaction import redact, secrets_in
from precision_lab.settings import DiagnoseConfig, own_settings


def main(words: list[str]) -> int:
    settings, others = own_settings(words, DiagnoseConfig, "diagnose.yaml")
    asked = compose(others)
    from precision_lab.diagnosis.diagnose import diagnose  # torch comes in here

    told = diagnose(asked, settings)
    secrets = secrets_in(os.environ, as_values(asked), words)
    folder = timed_folder(asked, "diagnoses")
    write_whole(folder / "diagnosis.json", json.dumps(storable(redact(told, secrets)), allow_nan=False) + "\n")
    write_whole(folder / "diagnosis.md", redact(markdown(told, others), secrets))
    print(redact(lines(told, others, shutil.get_terminal_size().columns), secrets))
    print(f"\n-> {folder}")
    return 0 if told["healthy"] else 3


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
