"""Which code a run is made of: a short hash of this package and of each file of the user's own. No torch.

Nothing is imported to find out. A file that a user's file imports in turn is not seen; torch and torchvision are
known by their versions.
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from precision_lab.config import Config
from precision_lab.open_sets import NAMES

PACKAGE = Path(__file__).parent
OURS = PACKAGE.name
# What no result of a run depends on.
NOT_TRAINING = (
    *("report", "sweep", "benchmark"),
    *("check.py", "largest_batch.py", "replay.py", "run_folder.py", "settings.py", "torture.py", "wording.py"),
)
KNOWN_BY_VERSION = ("torch", "torchvision")


def code_of(asked: Config) -> dict[str, str]:
    """8 hex digits for `precision_lab`, and for each open set whose `_target_` lies in another file.

    An open set whose file cannot be found is left out.
    """
    ours = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in NOT_TRAINING]
    code = {OURS: _digest(PACKAGE, sorted(ours))}
    for group in NAMES:
        target = getattr(asked, group)["_target_"]
        file = None if target.partition(".")[0] in (OURS, *KNOWN_BY_VERSION) else _file_of(target)
        if file:
            code[group] = _digest(file.parent, [file])
    return code


def _digest(base: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(base).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:8]


def _file_of(target: str) -> Path | None:
    """The file on sys.path that holds `package.module.Name`: the deepest one there is."""
    parts = target.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        for entry in sys.path:
            place = Path(entry).joinpath(*parts[:end])
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if os.path.isfile(file):  # pathlib raises for a name that is too long
                    return file
    return None
