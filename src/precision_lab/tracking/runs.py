"""What a W&B run tells a comparison, wherever W&B has it; what was told before is kept on disk. No torch, no wandb."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precision_lab.folders import read_json
from precision_lab.recorder import CannotWrite, write_whole
from precision_lab.tracking.of_folder import RECORD

FILES = {"train": "result.json", "benchmark": "benchmark.json"}  # job type -> the file whose text W&B has


@dataclass(frozen=True)
class Told:
    """One W&B run. `file` is None where its job type is none that is compared, `text` where there is none (yet)."""

    place: str
    id: str
    file: str | None
    text: str | None
    replaces: list[str]  # ids of W&B runs of the same folder, made before
    problem: str = ""  # why there is no text


def told_of(place: str, run_id: str, job_type: Any, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Told:
    """Of W&B's own words: anybody may have written them, so that nothing in them is sure."""
    text, replaces = summary.get(RECORD), config.get("replaces")
    ids = [one for one in replaces if isinstance(one, str)] if isinstance(replaces, list) else []
    file = FILES.get(job_type) if isinstance(job_type, str) else None
    problem = "" if isinstance(text, str) else "no result yet: still running, or killed"
    return Told(place, run_id, file, text if isinstance(text, str) else None, ids, problem)


class Kept:
    """What runs told, a file each; what is damaged, or older than the run, counts as not kept. None keeps nothing."""

    def __init__(self, folder: Path | None):
        self._folder = folder

    def find(self, place: str, key: str, stamp: list[Any]) -> Told | None:
        """What the run told under that key, if its stamp was the same; now it is at `place`."""
        known = read_json(self._file(key)) if self._folder else {}
        told = known.get("told")
        fits = (known.get("key"), known.get("stamp")) == (key, stamp) and _is_told(told)
        return Told(**told | {"place": place}) if fits else None

    def keep(self, told: Told, key: str, stamp: list[Any]) -> None:
        """A full disk is no trouble: the next reading takes longer."""
        with suppress(OSError, CannotWrite):
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(self._file(key), json.dumps({"key": key, "stamp": stamp, "told": asdict(told)}))

    def _file(self, key: str) -> Path:
        """By a hash: a key is anybody's text."""
        return self._folder / f"{hashlib.sha256(key.encode(errors='backslashreplace')).hexdigest()[:32]}.json"


def _is_told(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and set(values) == set(Told.__dataclass_fields__)
        and all(isinstance(values[key], str) for key in ("place", "id", "problem"))
        and values["file"] in (None, *FILES.values())
        and isinstance(values["text"], str | None)
        and isinstance(values["replaces"], list)
        and all(isinstance(one, str) for one in values["replaces"])
    )
