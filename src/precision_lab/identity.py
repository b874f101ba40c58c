"""What makes two runs the same: signatures, arm labels and the names made of them.

A field whose schema says `NOT_IDENTITY` does not count, one that says `WHERE_SET` not while it is null or an empty
list, nor does `kind`, which is a check and no argument. Where data lies is no part of the experiment, since the data
hash speaks for it; it is part of the run, whose folder is named before any data is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from precision_lab import open_sets
from precision_lab.config import Config, PrecisionConfig, as_values, load_precision
from precision_lab.open_sets import label
from precision_lab.redaction import redact, secrets_in

PLACE_ARGUMENTS = frozenset({"root", "path", "download"})


def counted(values: dict[str, Any], schema: type = Config) -> dict[str, Any]:
    """The part of a config's plain values that makes the experiment what it is."""
    known = {f.name: f for f in fields(schema)}
    result = {}
    for key, item in values.items():
        counts = known[key].metadata.get("identity", True) if key in known else True
        if not counts or (counts == "where set" and item in (None, [])):
            continue
        if key in known and isinstance(item, dict) and is_dataclass(known[key].type):
            item = counted(item, known[key].type)
        elif schema is Config and key in open_sets.NAMES and isinstance(item, dict):
            left_out = {"kind"} | (PLACE_ARGUMENTS if key == "dataset" else set())
            item = {k: v for k, v in item.items() if k not in left_out}
        result[key] = item
    return result


def counted_arm(precision: dict[str, Any]) -> dict[str, Any]:
    """The part of a precision group's plain values that makes the arm what it is."""
    return counted(precision, PrecisionConfig)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"trainer": {"steps": 5}}` -> `{"trainer.steps": 5}`."""
    result = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def differing(then: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, then, now) in words for each plain value that two nested dicts do not share."""
    then, now = flat(then), flat(now)
    for key in then | now:
        sides = [str(side[key]) if key in side else "missing" for side in (then, now)]
        if sides[0] != sides[1]:
            yield key, *sides


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def experiment_signature(config: Config) -> str:
    """8 hex digits: equal for runs that differ in arm, seed, device name, threads or bookkeeping only."""
    return _digest(counted(as_values(config)))


def run_signature(config: Config) -> str:
    """8 hex digits: the experiment's identity with arm, seed and, as it was typed, where the data lies.

    Data with a `name`, such as torchvision's, is the same wherever it lies. A file edited in place, and
    a relative path from another working directory, look the same here: run such again with rerun=all.
    """
    values = as_values(config)
    dataset = values["dataset"]
    places = {key: dataset[key] for key in sorted(PLACE_ARGUMENTS - {"download"}) if key in dataset}
    told = [places] if places and "name" not in dataset else []
    return _digest([counted(values), counted_arm(values["precision"]), config.seed, *told])


def arm_label(precision: PrecisionConfig) -> str:
    """The arm's name plus what differs from its YAML: `fp16[fp32_modules=attn]`."""
    stated, actual = as_values(load_precision(precision.name)), as_values(precision)
    changes = []
    for key, value in actual.items():
        if value != stated[key]:
            text = "+".join(map(str, value)) if isinstance(value, list) else value
            changes.append(f"{key}={text}")
    return precision.name + (f"[{','.join(changes)}]" if changes else "")


def title(config: Config) -> str:
    """What runs, for the reader: `bf16: mlp on digits, seed 0`."""
    return f"{arm_label(config.precision)}: {label(config.model)} on {label(config.dataset)}, seed {config.seed}"


def slug(config: Config, device: str) -> str:
    """The run folder's readable name; the run signature at its end makes it unique by content."""
    arm = config.precision.name.lower() + ("-emulated" if config.precision.emulate else "")
    parts = [label(config.model), label(config.dataset), arm, f"s{config.seed}", device]
    parts = redact(parts, secrets_in(os.environ, as_values(config)))
    return "_".join(re.sub(r"[^a-z0-9.-]+", "-", part)[:40] for part in parts) + f"_{run_signature(config)}"
