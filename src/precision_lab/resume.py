"""Going on with a run that was stopped: what a checkpoint says it is of, and whether that is this run.

A run goes on by itself only where nothing would tell its numbers from those of a run that was never stopped: with the
same configuration, code, versions and hardware. Where the user names the checkpoint, other hardware and code are said.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from precision_lab import checkpoint, hardware
from precision_lab.config import Config, as_values
from precision_lab.errors import InputError
from precision_lab.identity import arm_label, counted, counted_arm, differing
from precision_lab.recorder import hash_of
from precision_lab.redaction import redact

SHOWN = 3  # keys that differ
_PROGRESS = {"step": int, "nonfinite_steps": int, "skipped_steps": int, "skips_in_a_row": int, "loss_scale": float}
# What a run's state is made of, as far as it is the same for all runs.
KINDS = {
    "about": {"arm": str, "config": dict, "code": dict, "torch": str, "fingerprint": dict, "hashes": dict},
    "trainer": {
        **{"done": int, "model": dict, "optimizer": dict, "scaler": dict, "window": list, "guarded": list},
        "unlogged": dict | None,
        "progress": {**_PROGRESS, "losses": str, "spikes": dict},
    },
    "batches": {"handed_out": int, "hash": str},
    "meter": {"step_ms": list, "train_s": float, "wait_ms": float, "samples": int, "peaks": dict},
    "generators": {"torch": Tensor, "numpy": list, "python": list},
    "findings": {"final": dict, "best": dict, "curve": list, "resumed_at": list, "unreadable": list},
    "position": {"metrics_bytes": int, "metrics_hash": str, "elapsed_s": float},
}


def about(
    asked: Config, environment: dict[str, Any], secrets: list[str], hashes: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a checkpoint must be of for a run to go on with it: plain values. Without `hashes`, of whatever data."""
    values = as_values(asked)
    return redact(
        {
            "arm": arm_label(asked.precision),
            "config": {**counted(values), "precision": counted_arm(values["precision"]), "seed": asked.seed},
            "code": environment["code"],
            "torch": environment["versions"]["torch"],
            "fingerprint": environment["fingerprint"],
            "hashes": hashes or {},
        },
        secrets,
    )


def go_on(
    folder: Path,
    now: dict[str, Any],
    paths: list[Path],
    load: Callable[[dict[str, Any]], None],
    begin_anew: Callable[[], None],
    as_it_was: bool = False,
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Load the first of these checkpoints of a run's folder that can be used.

    `now` is what this run is, by `about`; `begin_anew` is called where `load` failed half way. Returns the state, in
    what the run has changed since, which with `as_it_was` is nothing, and why those before cannot be used. InputError
    if none can be used, with the reasons.
    """
    problems: list[str] = []
    for path in paths:
        try:
            state = checkpoint.read(path)
            _check(state, path, folder, now)
            changed = [f"{path}: {change}" for change in changes(state["about"], now)]
            if as_it_was and changed:
                raise InputError(" ".join(f"{change}." for change in changed))
        except InputError as error:
            problems.append(str(error))
            continue
        try:
            load(state)
            return state, changed, problems
        except Exception as error:
            if not isinstance(error, InputError) and (hardware.is_out_of_memory(error) or isinstance(error, OSError)):
                raise  # which is no fault of the checkpoint's
            said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {str(error).rstrip('.')}."
            problems.append(f"{path} cannot be loaded: {said}")
        begin_anew()
    older = f" Nor can any of {len(problems) - 1} older ones be used." if len(problems) > 1 else ""
    raise InputError(problems[0] + older if problems else f"{folder} holds no checkpoint.")


def _check(state: dict[str, Any], path: Path, folder: Path, now: dict[str, Any]) -> None:
    if wrong := next(_wrong_kinds(state, KINDS), None):
        raise InputError(f"{path} lacks {wrong}, or holds another kind of value there: damaged, or of other code.")
    saved, done = state["about"], state["trainer"]["done"]
    if _major(saved["torch"]) != _major(now["torch"]):
        raise InputError(f"{path} was written by torch {saved['torch']}, and this is torch {now['torch']}.")
    if differ := _differences(saved["config"], now["config"]):
        more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise InputError(
            f"{path} is of another run, of {saved['arm']}: {'; '.join(differ[:SHOWN])}{more}. "
            "trainer.init_from takes its weights alone."
        )
    for name, value in now["hashes"].items():
        if saved["hashes"].get(name) != value:
            words = name.replace("_", " ")
            raise InputError(f"{path} was written with other {words} (hash {saved['hashes'].get(name)}, now {value}).")
    if not 0 <= done * now["config"]["trainer"]["accumulation"] == state["batches"]["handed_out"]:
        raise InputError(f"{path} is damaged: its trainer and its batches are not of the same step.")
    position, metrics = state["position"], folder / "metrics.jsonl"
    if not metrics.is_file() or not 0 <= position["metrics_bytes"] <= metrics.stat().st_size:
        raise InputError(f"{metrics} has lost lines that were there when {path.name} was written.")
    if hash_of(metrics, position["metrics_bytes"]) != position["metrics_hash"]:
        raise InputError(f"{metrics} holds other lines than when {path.name} was written.")


def _wrong_kinds(values: dict[str, Any], kinds: dict[str, Any], key: str = "") -> Iterator[str]:
    """`trainer.done` for each key under which there is no value of its kind."""
    for name, kind in kinds.items():
        there = isinstance(values.get(name), dict if isinstance(kind, dict) else kind)
        if not there:
            yield f"{key}{name}"
        elif isinstance(kind, dict):
            yield from _wrong_kinds(values[name], kind, f"{key}{name}.")


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what a run that goes on would differ from the one that was stopped, though it can: sentences without a dot."""
    found = []
    if differ := _differences(saved["fingerprint"], now["fingerprint"]):
        found.append(f"it was begun on other hardware ({'; '.join(differ)})")
    if differ := _differences(saved["code"], now["code"]):
        found.append(f"it was begun with other code ({'; '.join(differ)})")
    if saved["torch"] != now["torch"]:
        found.append(f"it was begun with torch {saved['torch']}, and this is {now['torch']}")
    return found


def _major(version: str) -> str:
    return version.partition(".")[0]


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`trainer.steps is 100, here 200` for each plain value that differs."""
    return [f"{key} is {then}, here {here}" for key, then, here in differing(saved, now)]
