"""Which dtype autocast really picks, per operation, for one step on the device that is here.

    python scripts/inspect_ops.py model=cnn dataset=digits precision=bf16 [by=module]

Takes the overrides of train.py. Prints operation -> input and output dtypes with counts, forward
and backward, casts apart; `by=module` splits the operations by module. Trains nothing.
"""

import shutil
import sys

from precision_lab.config import compose
from precision_lab.entry import exit_code
from precision_lab.errors import InputError


def main(words: list[str]) -> int:
    by = [word.partition("=")[2] for word in words if word.startswith("by=")]
    if by not in ([], ["operation"], ["module"]):
        raise InputError(f"by={by[-1]} is unknown; valid are operation and module.")
    asked = compose([word for word in words if not word.startswith("by=")])
    from precision_lab.inspection import inspect_step  # torch comes in here

    print(inspect_step(asked, by_module=by == ["module"], width=shutil.get_terminal_size().columns))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
