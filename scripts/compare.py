"""Put the runs below some folders side by side, an arm a row, and write comparison.md, .csv and .json.

python scripts/compare.py                                     all runs in outputs
python scripts/compare.py outputs/sweeps/demo --sort speed_ratio
python scripts/compare.py --where model=cnn --where seed=0,1 --reference bf16
"""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from precision_lab.config import ROOT
from precision_lab.entry import exit_code, print_anything
from precision_lab.errors import InputError
from precision_lab.recorder import write_whole
from precision_lab.report import files, render
from precision_lab.report.compare import SORTS, compare
from precision_lab.report.read import read


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs side by side, from their result.json.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="where runs lie (default: outputs)")
    parser.add_argument("--reference", default="fp32", metavar="ARM", help="compare with this arm (default: fp32)")
    only = "only runs of that value, or of several: seed=0,1; any key of a config will do"
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=only)
    parser.add_argument("--sort", metavar="COLUMN", help=f"order of the arms: {', '.join(SORTS)}")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where the files go (default: DIR, or what all share)")
    asked = parser.parse_args(words)
    folders = asked.folders or [ROOT / "outputs"]
    return exit_code(lambda: report(folders, asked.reference, asked.where, asked.sort, asked.into or shared(folders)))


def shared(folders: list[Path]) -> Path:
    """The folder that holds them all."""
    into = Path(os.path.commonpath(map(os.path.abspath, folders)))
    if into == Path(into.anchor):
        raise InputError(f"{', '.join(map(str, folders))}: nothing is written to {into}; name a folder with --into.")
    return folders[0] if len(folders) == 1 else into


def report(folders: list[Path], reference: str, where: list[str], sort: str | None, into: Path) -> int:
    found = read(folders, where)
    comparisons = compare(found, reference, sort)
    written = {
        "comparison.md": files.markdown(comparisons, found),
        "comparison.csv": files.as_csv(comparisons),
        "comparison.json": files.as_json(comparisons, found),
    }
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            write_whole(into / name, text)
    except OSError as error:
        raise InputError(f"{into} cannot be written to ({error.strerror}); name a folder with --into.") from error
    console = Console(highlight=False)
    render.show(comparisons, found, console)
    console.print(f"written: {into}/comparison.md, .csv, .json", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    print_anything()
    sys.exit(main(sys.argv[1:]))
