"""Put the runs of some folders or of W&B side by side, an arm a row, and write comparison.md, .csv and .json.

python scripts/compare.py                                     all runs in outputs
python scripts/compare.py outputs/sweeps/demo --sort speed_ratio
python scripts/compare.py --where model=cnn --where seed=0,1 --reference bf16
python scripts/compare.py --html report.html --price-per-hour 2.5     a page with charts, and what a run costs
python scripts/compare.py "wandb:team/project?precision=bf16,fp32"    a team's runs, from W&B
python scripts/compare.py wandb-offline:outputs/wandb outputs/sweeps  W&B's files here, and folders beside them
python scripts/compare.py outputs/sweeps/demo --wandb                 the comparison as a W&B run: table, charts, page
"""

import argparse
import math
import os
import sys
from pathlib import Path

from rich.console import Console

from precision_lab.config import ROOT, Config, WandbMode, compose
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError
from precision_lab.recorder import CannotWrite, write_whole
from precision_lab.redaction import secrets_in
from precision_lab.report import files, render
from precision_lab.report.compare import SORTS, compare
from precision_lab.report.read import read
from precision_lab.report.sources import KINDS, Source, source_of


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs side by side, from their result.json.")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=f"where runs are (default: outputs); {KINDS}")
    parser.add_argument("--reference", default="fp32", metavar="ARM", help="compare with this arm (default: fp32)")
    only = "only runs of that value, or of several: seed=0,1; any key of a config will do"
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=only)
    parser.add_argument("--sort", metavar="COLUMN", help=f"order of the arms: {', '.join(SORTS)}")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where the files go (default: DIR, or what all share)")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts, too; it needs no network")
    parser.add_argument("--price-per-hour", metavar="PRICE", help="of this hardware: the page tells what a run costs")
    parser.add_argument("--wandb", action="store_true", help="log it to W&B, too, by WANDB_MODE and WANDB_PROJECT")
    asked = parser.parse_args(words)
    return exit_code(lambda: report(asked, [source_of(text) for text in asked.sources or [ROOT / "outputs"]]))


def shared(sources: list[Source]) -> Path:
    """The folder that holds all that lies here; one of its own for a W&B project alone."""
    folders = [source.folder for source in sources if source.folder]
    if not folders:
        if len(sources) > 1:
            raise InputError(f"{', '.join(one.text for one in sources)}: name a folder for the files with --into.")
        project = sources[0].project
        return ROOT / "outputs" / "comparisons" / f"{project.entity}_{project.project}"
    into = Path(os.path.commonpath(map(os.path.abspath, folders)))
    if into == Path(into.anchor):
        raise InputError(f"{', '.join(map(str, folders))}: nothing is written to {into}; name a folder with --into.")
    return folders[0] if len(folders) == 1 else into


def report(asked: argparse.Namespace, sources: list[Source]) -> int:
    html, wandb = page_file(asked.html), of_wandb() if asked.wandb else None
    price, into = price_of(asked), asked.into or shared(sources)
    found = read([source.text for source in sources], asked.where, ROOT / "outputs" / "cache" / "wandb")
    comparisons = compare(found, asked.reference, asked.sort)
    written = {
        into / "comparison.md": files.markdown(comparisons, found),
        into / "comparison.csv": files.as_csv(comparisons),
        into / "comparison.json": files.as_json(comparisons, found),
    }
    for path, text in written.items():
        write(path, text, into, "a folder with --into")
    if html or wandb:
        from precision_lab.report.page import page, sections_of  # its libraries take a while to load

        sections = sections_of(comparisons, price)
        drawn = page(comparisons, found, price, sections)
    if html:
        write(html, drawn, html, "another file with --html")
    console = Console(highlight=False)
    render.show(comparisons, found, console)
    console.print(f"written: {into}/comparison.md, .csv, .json", markup=False, soft_wrap=True)
    if html:
        console.print(f"the page: {html.absolute()}", markup=False, soft_wrap=True)
    if wandb:
        from precision_lab.report.to_wandb import hand_over

        secrets = secrets_in(os.environ, words=sys.argv)
        if place := hand_over(comparisons, found, sections, drawn, wandb, secrets):
            console.print(f"in W&B: {place}", markup=False, soft_wrap=True)
    return 0


def of_wandb() -> Config:
    """Mode, project and folder of W&B, as for every run."""
    asked = compose([])
    if asked.wandb.mode is WandbMode.disabled:
        raise InputError("--wandb and WANDB_MODE=disabled contradict each other; set it to offline or online.")
    return asked


def page_file(name: str | None) -> Path | None:
    """Of a page's own ending: no run's file is written over."""
    if name is not None and Path(name).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--html {name or repr(name)} is no file of a page; end its name in .html or .htm.")
    return None if name is None else Path(name)


def price_of(asked: argparse.Namespace) -> float | None:
    if asked.price_per_hour is None:
        return None
    if not asked.html:
        raise InputError("--price-per-hour is told on the page: name its file with --html.")
    try:
        price = float(asked.price_per_hour)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price >= 0):
        raise InputError(f"--price-per-hour {asked.price_per_hour} is no price; write a number such as 2.5, or 0.")
    return price


def write(path: Path, text: str, place: Path, other: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except (OSError, CannotWrite) as error:
        raise InputError(f"{place} cannot be written to ({error.strerror}); name {other}.") from error


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(main(sys.argv[1:]))
