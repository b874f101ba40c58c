"""The settings that a script has beside those of train.py: typed, their defaults in a YAML file of conf/. No torch."""

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from precision_lab import ranges
from precision_lab.arm_schema import Target
from precision_lab.config import CONF, MOST_GIB
from precision_lab.errors import InputError, at_least, require

Settings = TypeVar("Settings")


TARGETS = [target.name for target in Target]
_LISTED = f"{', '.join(TARGETS[:-1])} and {TARGETS[-1]}"


def _check_target(target: str | None) -> None:
    require(target in (None, *TARGETS), f"target={target} is unknown; valid are {_LISTED}.")


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
class InspectOpsConfig:
    """Whose autocast policy scripts/inspect_ops.py shows, and how."""

    target: str | None = MISSING
    by: str = MISSING
    diff: list[str] | None = MISSING

    def __post_init__(self) -> None:
        _check_target(self.target)
        require(self.by in ("operation", "module"), f"by={self.by} is unknown; valid are operation and module.")
        require(
            self.diff is None or (len(self.diff) == 2 == len({*self.diff} & {*TARGETS})),
            f"diff=[{','.join(self.diff or [])}] is not valid; it takes two different targets of {_LISTED}.",
        )
        require(self.diff is None or self.target is None, "diff names both of its targets; leave target out.")


@dataclass
class DiagnoseConfig:
    """Whose mixed precision scripts/diagnose.py looks at, on what weights, and how long it proves a cure."""

    target: str | None = MISSING
    checkpoint: str | None = MISSING
    steps: int = MISSING
    budget_s: float = MISSING

    def __post_init__(self) -> None:
        _check_target(self.target)
        self.checkpoint = self.checkpoint and (ranges.newest_checkpoint(self.checkpoint) or self.checkpoint)
        ranges.weights("checkpoint", self.checkpoint)
        at_least("steps", self.steps, 0, 1_000_000)
        require(
            0 < self.budget_s < math.inf, f"budget_s={self.budget_s} must be above 0 and finite: seconds to measure."
        )


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
