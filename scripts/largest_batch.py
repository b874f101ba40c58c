"""Find the largest trainer.batch_size that each arm fits into a budget of memory.

python scripts/largest_batch.py model=cnn dataset=digits arms=[fp32,bf16] budget_gib=0.5

Takes the overrides of train.py but for precision and trainer.batch_size, and settings of its own, which are listed in
conf/largest_batch.yaml. Trains a few steps an arm, each in a process of its own, and leaves nothing behind.
"""

import sys

from rich.console import Console

from precision_lab.arms import arms_of, key_of
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import Ended, InputError
from precision_lab.largest_batch import find_largest
from precision_lab.settings import LargestBatchConfig, own_settings


def main(words: list[str]) -> int:
    settings, others = own_settings(words, LargestBatchConfig, "largest_batch.yaml")
    if sized := next((word for word in others if key_of(word) == "trainer.batch_size"), None):
        raise InputError(f"{sized}: the batch size is what is looked for; leave it out.")
    asked = arms_of(settings.arms, others)
    if settings.reference not in asked:
        raise InputError(f"reference={settings.reference} is none of the arms, which are {', '.join(asked)}.")
    try:
        find_largest(asked, settings, Console(highlight=False, markup=False, emoji=False))
    except Ended as end:
        return end.code
    return 0


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
