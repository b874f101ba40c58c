"""What the results of some sources say, checked: result.json's and benchmark.json's text; one that is no use is named.

A run's config is kept once for each experiment signature, which stands for it, so that thousands of runs fit
into memory.
"""

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from precision_lab import open_sets
from precision_lab.errors import InputError
from precision_lab.identity import counted, counted_arm, flat
from precision_lab.open_sets import label
from precision_lab.recorder import SCHEMA_VERSION, STATUSES
from precision_lab.report import benchmarks
from precision_lab.report.benchmarks import Benchmark
from precision_lab.report.sources import RESULT, Record, records, source_of
from precision_lab.report.stored import lacking, missing, object_in

_TELLING = ("device", "model", "threads", "count", "memory_gib", "capability")  # a fingerprint, in reading order
_TEXTS_OF_AN_ARM = ("name", "autocast_dtype", "param_dtype")
_OF_A_CURVE = ("step", "train_s", "val_loss_fp32")
_TOO_LARGE = 1e100  # for a figure: its sums and ratios would overflow
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_NEEDED = {
    "schema": int, "status": str, "arm": str, "seed": int, "experiment_signature": str, "finished": int | float,
    "config": dict, "summary": dict, "hashes": dict, "fingerprint": dict, "support": dict, "versions": dict,
    "git": dict, "host": str, "overrides": list, "curve": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """What a comparison needs of one run."""

    folder: str  # or where W&B has it
    of_wandb: bool  # read from there: of what lies in its folder there is its result alone
    name: str  # of the experiment, else of its model and data
    arm: str
    precision: str  # the whole precision group as JSON: the arm's identity
    seed: int
    status: str
    reason: str
    experiment: str  # signature
    finished: float  # seconds since 1970
    summary: dict[str, float | None]
    hashes: dict[str, str]
    fingerprint: tuple[tuple[str, Any], ...]
    support: dict[str, str]
    host: str
    versions: dict[str, Any]
    git: dict[str, Any]
    overrides: list[str]  # that the run was started with
    memory: dict[str, Any] | None  # its peak by kind, in bytes
    unreadable: int  # files of the data that were left out or replaced
    curve: dict[str, list[float]]  # step, train_s and val_loss_fp32 of its evaluations


@dataclass
class Found:
    """The runs of some sources, the configs of their experiments by signature, and what could not be read."""

    sources: list[str]  # as typed
    where: list[str]  # the conditions that the runs fit
    runs: list[Run] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)  # flat: {"trainer.steps": 200}; identity only
    skipped: list[tuple[str, str]] = field(default_factory=list)  # folder, reason
    benchmarks: list[Benchmark] = field(default_factory=list)


def read(sources: Sequence[str | os.PathLike[str]], where: Sequence[str] = (), cache: Path | None = None) -> Found:
    """All results of `sources` that fit every `key=value` of `where`; a run reached twice counts once.

    `cache` is a folder for what W&B told. InputError for a source that is none or cannot be read, a condition that is
    none, a key that no run has, or if no run fits.
    """
    named = [source_of(source) for source in sources]
    conditions = [_Condition(text) for text in where]
    found, again = Found([source.text for source in named], list(where)), _Again()
    for record in records(named, cache):
        benchmark, result, problem = None, {}, record.problem
        if not problem and record.file == RESULT:
            result, problem = _parsed(record.text)
        elif not problem:
            benchmark, problem = benchmarks.parsed(record.place, record.text)
        if problem:
            found.skipped.append((plain(record.place), problem))
        elif again.known(record, benchmark.told if benchmark else result):
            continue
        elif benchmark:
            found.benchmarks.append(benchmark)
        elif all([condition.fits(result) for condition in conditions]):  # each sees every run
            _take(result, record, found)
    for condition in conditions:
        condition.check()
    if not found.runs and any(condition.fitted for condition in conditions):
        raise InputError(f"No run fits all of {' and '.join(where)}.")
    return found


class _Again:
    """Knows a run that W&B has, too, or has twice, by what no two runs share."""

    def __init__(self) -> None:
        self._of_wandb: dict[str, bool] = {}

    def known(self, record: Record, told: dict[str, Any]) -> bool:
        """Whether it was there before. Of two folders each counts: a copy is for the user to take away."""
        keys = ("host", "finished", "experiment_signature", "fingerprint", "arm", "seed", "reference")
        key = json.dumps([record.file, *(told.get(key) for key in keys)], sort_keys=True)
        before = self._of_wandb.get(key)
        self._of_wandb.setdefault(key, record.of_wandb)
        return before is not None and (before or record.of_wandb)


def plain(text: str) -> str:
    """A user's own text on one line, and fit to be written: no control characters, no half of a character."""
    return _CONTROL.sub(" ", text).encode(errors="backslashreplace").decode()


def _parsed(text: bytes | str) -> tuple[dict[str, Any], str]:
    """(what result.json holds, "") or ({}, why it is no use)."""
    if not text.strip():
        return {}, f"{RESULT} is empty"
    result, problem = object_in(text, RESULT)
    problem = problem or _problem(result)
    return ({}, problem) if problem else (result, "")


def _problem(result: dict[str, Any]) -> str:
    if problem := lacking(result, SCHEMA_VERSION, _NEEDED, RESULT):
        return problem
    config = result["config"]
    if not _is_share(config.get("verdict")):
        return missing("verdict.loss_margin", RESULT)
    fit = (
        result["status"] in STATUSES
        and isinstance(config.get("precision"), dict)
        and all(isinstance(config["precision"].get(key), str | None) for key in _TEXTS_OF_AN_ARM)
        and isinstance(config.get("name"), str | None)
        and isinstance(result.get("reason"), str | None)
        and all(_is_target(config.get(group)) for group in open_sets.NAMES)
        and all(_is_number(value) for key, value in result["summary"].items() if key != "nonfinite")
        and all(isinstance(value, str) for value in [*result["hashes"].values(), *result["support"].values()])
        and not any(isinstance(value, dict | list) for value in result["fingerprint"].values())
        and all(isinstance(word, str) for word in result["overrides"])
        and _is_memory(result.get("memory"))
        and _is_count(result.get("unreadable_files"))
        and _is_curve(result["curve"])
    )
    return "" if fit else f"{RESULT} is damaged: it holds values of a wrong type"


def _is_memory(memory: Any) -> bool:
    return memory is None or (
        isinstance(memory, dict)
        and isinstance(memory.get("phase"), str)
        and isinstance(memory.get("by_kind"), dict)
        and all(_is_number(value) and value is not None for value in memory["by_kind"].values())
    )


def _is_count(files: Any) -> bool:
    return files is None or (isinstance(files, dict) and type(files.get("count")) is int)


def _is_curve(curve: dict[str, Any]) -> bool:
    """Nothing, or the columns in equal lengths; a time or a loss may not be known, a step is."""
    whole = all(isinstance(one, list) and all(map(_is_number, one)) for one in curve.values())
    columns = [curve.get(name) for name in _OF_A_CURVE]
    return not curve or (
        whole and None not in columns and len(set(map(len, columns))) == 1 and None not in curve["step"]
    )


def _is_share(verdict: Any) -> bool:
    margin = verdict.get("loss_margin") if isinstance(verdict, dict) else None
    return _is_number(margin) and margin is not None and margin > 0


def _is_target(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("_target_"), str)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and abs(value) < _TOO_LARGE)


def _take(result: dict[str, Any], record: Record, found: Found) -> None:
    signature, config = result["experiment_signature"], result["config"]
    if signature not in found.configs:
        found.configs[signature] = flat(counted(config))
    name = config.get("name") or f"{label(config['model'])} on {label(config['dataset'])}"
    machine = result["fingerprint"]
    order = {key: place for place, key in enumerate(_TELLING)}
    found.runs.append(
        Run(
            folder=plain(record.place),
            of_wandb=record.of_wandb,
            name=plain(name),
            arm=plain(result["arm"]),
            precision=json.dumps(counted_arm(config["precision"]), sort_keys=True),
            experiment=signature,
            fingerprint=tuple(sorted(machine.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
            reason=plain(result.get("reason") or ""),
            **{key: result[key] for key in ("seed", "status", "finished", "summary", "hashes")},
            host=plain(result["host"]),
            **{key: result[key] for key in ("support", "versions", "git")},
            overrides=[plain(word) for word in result["overrides"]],
            memory=result.get("memory"),
            unreadable=(result.get("unreadable_files") or {"count": 0})["count"],
            curve=result["curve"],
        )
    )


class _Condition:
    """`key=value` or `key=value,other`: of a run's config, or of one of the short names."""

    def __init__(self, text: str):
        self.text, self.fitted = text, False
        self.key, equals, wanted = text.partition("=")
        if not equals or not self.key:
            raise InputError(f"--where {text} is not a condition; write key=value, such as seed=0,1 or model=cnn.")
        self.wanted = [wanted, *wanted.split(",")]  # whole as well: a list has commas
        self.keys: set[str] = set()  # that runs have
        self.values: set[str] = set()

    def fits(self, result: dict[str, Any]) -> bool:
        known = _short_names(result)
        if self.key not in known:
            machine = {key: result[key] for key in ("fingerprint", "versions")}
            known |= flat(result["config"]) | flat(machine)
            self.keys |= set(known)
        if self.key not in known:
            return False
        value = known[self.key]
        self.values.add(_text(value))
        fits = any(_says(text, value) for text in self.wanted)
        self.fitted = self.fitted or fits
        return fits

    def check(self) -> None:
        """InputError if no run has such a key, or such a value."""
        if self.values and not self.fitted:
            shown = sorted(self.values)
            there = ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
            raise InputError(f"--where {self.text} fits no run; there is {self.key}={there}.")
        if self.keys and not self.values:
            near = difflib.get_close_matches(self.key, self.keys, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"short names are {', '.join(_SHORT)}."
            raise InputError(f"--where {self.text}: no run has the key {self.key}; {hint}")


_SHORT = ("arm", "precision", "model", "dataset", "seed", "status", "name", "device", "hardware", "host")


def _short_names(result: dict[str, Any]) -> dict[str, Any]:
    config, machine = result["config"], result["fingerprint"]
    values = (
        result["arm"], config["precision"].get("name"), label(config["model"]), label(config["dataset"]),
        result["seed"], result["status"], config.get("name"), machine.get("device"), machine.get("model"),
        result["host"],
    )  # fmt: skip
    return dict(zip(_SHORT, values, strict=True))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _says(text: str, value: Any) -> bool:
    """Whether a person who types `text` may mean `value`."""
    try:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return text == _text(value) or (float(text) if number else yaml.safe_load(text)) == value
    except (ValueError, LookupError, AttributeError, yaml.YAMLError):
        return False
