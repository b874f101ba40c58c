"""Finds results and reads them. Opens result.json and benchmark.json and nothing else; one that is no use is named.

A run's config is kept once for each experiment signature, which stands for it, so that thousands of runs fit
into memory.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from precision_lab import open_sets
from precision_lab.errors import InputError
from precision_lab.identity import counted, counted_arm, flat
from precision_lab.open_sets import label
from precision_lab.recorder import SCHEMA_VERSION, STATUSES
from precision_lab.report.benchmarks import FILE as BENCHMARK
from precision_lab.report.benchmarks import Benchmark
from precision_lab.report.benchmarks import load as load_benchmark
from precision_lab.report.stored import lacking, missing, object_in

# W&B's own folders, which hold no result of ours and may be many.
_WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")
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
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class Run:
    """What a comparison needs of one run."""

    folder: str
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
    """The runs below some folders, the configs of their experiments by signature, and what could not be read."""

    folders: list[Path]  # that were looked through
    where: list[str]  # the conditions that the runs fit
    runs: list[Run] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)  # flat: {"trainer.steps": 200}; identity only
    skipped: list[tuple[str, str]] = field(default_factory=list)  # folder, reason
    benchmarks: list[Benchmark] = field(default_factory=list)


def read(folders: list[Path], where: Sequence[str] = ()) -> Found:
    """All results below `folders` that fit every `key=value` of `where`; a run reached twice counts once.

    InputError for a folder that is none, a condition that is none, a key that no run has, or if no run fits.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise InputError(f"{folder} is not a folder; name one that holds runs.")
    conditions = [_Condition(text) for text in where]
    found = Found(folders, list(where))
    for folder, file, problem in _result_folders(folders):
        if file == BENCHMARK and not problem:
            benchmark, problem = load_benchmark(folder)
            found.benchmarks += [benchmark] if benchmark else []
        elif not problem:
            result, problem = _load(folder)
        if problem:
            found.skipped.append((plain(folder), problem))
        elif file != BENCHMARK and all([condition.fits(result) for condition in conditions]):  # each sees every run
            _take(result, folder, found)
    for condition in conditions:
        condition.check()
    if not found.runs and any(condition.fitted for condition in conditions):
        raise InputError(f"No run fits all of {' and '.join(where)}.")
    return found


def plain(text: str) -> str:
    """A user's own text on one line, and fit to be written: no control characters, no half of a character."""
    return _CONTROL.sub(" ", text).encode(errors="backslashreplace").decode()


def _result_folders(folders: list[Path]) -> Iterator[tuple[str, str, str]]:
    """Every folder of a run or benchmark, its file, and why there is no result where there is none.

    What lies below one is its own affair.
    """
    todo, seen = [os.fspath(folder) for folder in reversed(folders)], set()
    while todo:
        folder = todo.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:  # named twice, or linked to
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                inside = {entry.name: entry for entry in entries}
            below = [name for name in inside if _is_folder(inside[name]) and not _WANDB_RUN.match(name)]
        except OSError as error:
            yield folder, "", f"cannot be opened ({error.strerror})"
            continue
        file = next((name for name in (RESULT, BENCHMARK) if name in inside), "")
        if file:
            yield folder, file, "" if os.path.isfile(inside[file].path) else f"{file} is not a file"
        elif "status.json" in inside:
            yield folder, "", "no result yet: still running, or killed"
        else:
            todo += [os.path.join(folder, name) for name in sorted(below, reverse=True)]


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a closed folder
        return False


def _load(folder: str) -> tuple[dict[str, Any], str]:
    """(what result.json holds, "") or ({}, why it is no use)."""
    try:
        with open(os.path.join(folder, RESULT), "rb") as file:
            text = file.read()
    except OSError as error:
        return {}, f"{RESULT} cannot be read ({error.strerror})"
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


def _take(result: dict[str, Any], folder: str, found: Found) -> None:
    signature, config = result["experiment_signature"], result["config"]
    if signature not in found.configs:
        found.configs[signature] = flat(counted(config))
    name = config.get("name") or f"{label(config['model'])} on {label(config['dataset'])}"
    machine = result["fingerprint"]
    order = {key: place for place, key in enumerate(_TELLING)}
    found.runs.append(
        Run(
            folder=plain(folder),
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
