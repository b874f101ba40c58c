"""Print the runs below some folders side by side, one row an arm.

python scripts/compare.py [DIR ...]      (default: outputs)
"""

import sys
from pathlib import Path

from rich.console import Console

from precision_lab.config import ROOT
from precision_lab.report import CAVEAT, results, tables


def main(words: list[str]) -> int:
    folders = [Path(word) for word in words] or [ROOT / "outputs"]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        print(f"precision-lab: {missing[0]} is not a folder; name one that holds runs.", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    shown = tables(results(folders))
    for table in shown:
        console.print(table)
        console.print()
    console.print(CAVEAT if shown else "no results here yet", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
