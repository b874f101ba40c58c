"""Which dtype autocast picks, per operation, in one training step: on this device, or on another that is not here.

    python scripts/inspect_ops.py model=cnn precision=bf16 [target=cuda] [by=module] [diff=[cpu,cuda]]

Takes the overrides of train.py, and settings of its own, which are listed in conf/inspect_ops.yaml. Prints operations,
forward and backward, with the dtypes that go in and come out, calls and FLOPs; casts apart, with their bytes; and which
share of the arithmetic runs in low precision. Trains nothing.
"""

import shutil
import sys

from precision_lab.config import compose
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.settings import InspectOpsConfig, own_settings


def main(words: list[str]) -> int:
    settings, others = own_settings(words, InspectOpsConfig, "inspect_ops.yaml")
    asked = compose(others)
    from precision_lab.op_maps import inspect_ops  # torch comes in here

    inspect_ops(asked, settings, shutil.get_terminal_size().columns, words)
    return 0


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
