"""Checks that fields of several schemas share: each raises InputError with the key, the value and what is valid."""

import math
import os
import stat
from glob import escape, glob
from typing import Any

from precision_lab.errors import require


def above_0(key: str, value: float | None, or_null: str) -> None:
    """A finite number above 0, or null, of which `or_null` says what it stands for."""
    fits = value is None or 0 < value < math.inf
    require(fits, f"{key}={value} must be above 0 and finite, or null for {or_null}.")


def texts(key: str, values: list[Any]) -> None:
    """A list of texts: OmegaConf lets lists and null pass as its items."""
    fits = all(isinstance(value, str) for value in values)
    require(fits, f"{key}={values} is not valid; it must be a list of texts, such as {key}=[a,b].")


def not_compiled(key: str, asked: bool, compiled: bool) -> None:
    """An instrument that needs modules to be called, which a compiled model does not do."""
    sentence = f"{key} looks at modules one by one, which a compiled model does not run; drop it or device.compile."
    require(not (asked and compiled), sentence)


def folder(key: str, path: str) -> None:
    """A folder, or one that can be made: no empty path, no name that is too long, no file in its way."""
    require(path != "", f"{key} is empty; name a folder, or . for the working directory.")
    require(_may_be_a_folder(path), f"{key}={path} is no folder and cannot become one; name another.")


def newest_checkpoint(path: str) -> str | None:
    """In the folder of a run; None where there is none."""
    there = sorted(glob(os.path.join(escape(path), "checkpoints", "step_*.pt")))
    return there[-1] if path and there else None


def weights(key: str, path: str | None) -> None:
    """A file, or null. Where it is the folder of a run, the newest checkpoint in it is named."""
    newest = newest_checkpoint(path or "")
    such = f", such as {newest}" if newest else ""
    fits = path is None or os.path.isfile(path)
    require(fits, f"{key}={path} is not a file; name a checkpoint whose weights to begin with{such}.")


def _may_be_a_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return not os.path.islink(path)
    except (OSError, ValueError):  # ValueError: a null byte
        return False
