"""What the folder of an earlier run says of it: its config, its log points, its first non-finite step. No torch."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from precision_lab.config import Config, of_values
from precision_lab.errors import InputError, require
from precision_lab.folders import read_file, read_json

MOST_VALUES = 10_000  # of a config


def config_of(folder: Path) -> Config:
    """What the run was asked to do. InputError where the folder holds none that can be used here."""
    path, values = folder / "config.yaml", values_of(folder)
    secret = "[redacted]" in str(values)
    require(not secret, f"{path} has a secret left out, without which the run cannot be made again.")
    return typed_config(values, str(path))


def typed_config(values: dict[str, Any], source: str) -> Config:
    """Of a run's stored values. InputError where `source` holds no such."""
    trainer = values.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("resume"), str):
        # a checkpoint that the run went on from need not be there any more
        values = values | {"trainer": trainer | {"resume": "auto"}}
    return of_values(values, source)


def values_of(folder: Path) -> dict[str, Any]:
    """What config.yaml holds, secrets left out. InputError where there is none that can be read."""
    path = folder / "config.yaml"
    require(os.path.isdir(folder), f"{folder} is not a folder; name a run's.")
    try:
        values = yaml.load(read_file(path).decode(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a run's folder.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged and cannot be read.") from error
    require(isinstance(values, dict), f"{path} holds no config of a run.")
    require(_values_in(values) < MOST_VALUES, f"{path} is damaged: it is no config of a run.")
    return values


def _values_in(values: Any) -> int:
    """How many values a file holds, counted up to MOST_VALUES: YAML's own links may make billions of a few."""
    count, todo = 0, [values]
    while todo and count < MOST_VALUES:
        value = todo.pop()
        count += 1
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count


def log_points(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl that can be read, the oldest first."""
    try:
        text = read_file(folder / "metrics.jsonl").decode(errors="replace")
    except OSError:
        return
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("train/step"), int):
            yield line


def nonfinite_step(folder: Path) -> tuple[int, int]:
    """(first, last): the steps among which the one is where things went wrong. InputError if the run had none."""
    told = read_json(folder / "result.json").get("nonfinite")
    told = told if isinstance(told, dict) else {}
    known = told.get("first_loss") or told.get("last_streak_from") or told.get("first_step")
    if isinstance(known, int) and known >= 1:
        return known, known
    before = 0
    for line in log_points(folder):
        if line.get("amp/nonfinite_steps") and line["train/step"] > before:
            return before + 1, line["train/step"]
        before = max(before, line["train/step"])
    raise InputError(f"{folder} has recorded no non-finite step; name one to look at: step=1 is the first.")
