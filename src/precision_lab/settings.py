"""The settings that a script has beside those of train.py: typed, their defaults in a YAML file of conf/. No torch."""

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from precision_lab.config import CONF, MOST_GIB
from precision_lab.errors import InputError, at_least, require

Settings = TypeVar("Settings")


@dataclass
class BenchmarkConfig:
    """What scripts/benchmark.py times, and for how long."""

    arms: str = MISSING
    reference: str = MISSING
    budget_s: float = MISSING
    half_width: float = MISSING
    data: bool = MISSING
    compiled: bool = MISSING
    processes: bool | None = MISSING

    def __post_init__(self) -> None:
        require(
            0 < self.budget_s < math.inf, f"budget_s={self.budget_s} must be above 0 and finite: seconds to measure."
        )
        require(
            0 < self.half_width < 1, f"half_width={self.half_width} must be above 0 and below 1: a share of the ratio."
        )


@dataclass
class LargestBatchConfig:
    """What scripts/largest_batch.py looks for, and in how much memory."""

    arms: str = MISSING
    reference: str = MISSING
    budget_gib: float | None = MISSING

    def __post_init__(self) -> None:
        require(
            self.budget_gib is None or 0 < self.budget_gib < math.inf,
            f"budget_gib={self.budget_gib} must be above 0 and finite, or null.",
        )
        at_least("budget_gib", self.budget_gib, 0, MOST_GIB)


@dataclass
class SelfcheckConfig:
    """How long scripts/selfcheck.py looks."""

    tries: int = MISSING
    budget_s: float = MISSING
    loss: bool = MISSING

    def __post_init__(self) -> None:
        at_least("tries", self.tries, 0)
        require(
            0 < self.budget_s < math.inf, f"budget_s={self.budget_s} must be above 0 and finite: seconds of a trial."
        )


@dataclass
class TortureConfig:
    """How often scripts/torture.py kills runs, and how long they are."""

    kills: int = MISSING
    steps: int = MISSING
    seed: int = MISSING
    at_once: int = MISSING

    def __post_init__(self) -> None:
        at_least("kills", self.kills, 1)
        at_least("steps", self.steps, 50)
        at_least("seed", self.seed, 0)
        at_least("at_once", self.at_once, 1)


def _parsed(key: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"{key}={value} is not valid: it cannot be read as a value.") from error


def own_settings(words: list[str], schema: type[Settings], file: str) -> tuple[Settings, list[str]]:
    """What `words` set of a script's own settings, on top of conf/<file>; and the other words, for train.py's.

    A text is taken as it stands, any other value as YAML.
    """
    own = {field.name: field.type for field in fields(schema)}
    given: dict[str, Any] = {}
    others = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in own and equals:
            given[key] = value if own[key] is str else _parsed(key, value)
        else:
            others.append(word)
    try:
        stated = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(CONF / file), given)
        return OmegaConf.to_object(stated), others
    except OmegaConfBaseException as error:
        key = (error.full_key or next(iter(given), "")).split(".")[0]
        kind = getattr(own.get(key), "__name__", str(own.get(key)))
        raise InputError(f"{key}={given.get(key)} is not valid; it takes a value of type {kind}.") from error
