"""Going on with a run that was stopped: what a checkpoint says it is of, and whether that is this run.

A run goes on by itself only where nothing would tell its numbers from those of a run that was never stopped: with the
same configuration, code, versions and hardware. Where the user names the checkpoint, other hardware and code are said.
"""

from pathlib import Path
from typing import Any

from precision_lab import checkpoint
from precision_lab.config import Config, as_values
from precision_lab.errors import InputError
from precision_lab.identity import arm_label, counted, differing
from precision_lab.recorder import hash_of
from precision_lab.redaction import redact

SHOWN = 3  # keys that differ
PARTS = ("about", "trainer", "batches", "meter", "generators", "findings", "position")


def about(
    asked: Config, environment: dict[str, Any], secrets: list[str], hashes: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a checkpoint must be of for a run to go on with it: plain values. Without `hashes`, of whatever data."""
    values = as_values(asked)
    return redact(
        {
            "arm": arm_label(asked.precision),
            "config": {**counted(values), "precision": values["precision"], "seed": asked.seed},
            "code": environment["code"],
            "torch": environment["versions"]["torch"],
            "fingerprint": environment["fingerprint"],
            "hashes": hashes or {},
        },
        secrets,
    )


def state_to_go_on_from(
    folder: Path, now: dict[str, Any], paths: list[Path]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The first of these checkpoints of a run's folder that can be used: its state, in what the run has changed since,
    and why those before it cannot be used.

    `now` is what this run is, by `about`. InputError if there is none, with the reasons.
    """
    problems: list[str] = []
    for path in paths:
        try:
            state = checkpoint.read(path)
            _check(state, path, folder, now)
            return state, [f"{path}: {change}" for change in changes(state["about"], now)], problems
        except InputError as error:
            problems.append(str(error))
        except (KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path} is no checkpoint of a run: it lacks {error}.")
    older = f" Nor can any of {len(problems) - 1} older ones be used." if len(problems) > 1 else ""
    raise InputError(problems[0] + older if problems else f"{folder} holds no checkpoint.")


def _check(state: dict[str, Any], path: Path, folder: Path, now: dict[str, Any]) -> None:
    if lacking := [part for part in PARTS if not isinstance(state.get(part), dict)]:
        raise InputError(f"{path} is no checkpoint of a run: it lacks {', '.join(lacking)}.")
    saved = state["about"]
    if _major(saved["torch"]) != _major(now["torch"]):
        raise InputError(f"{path} was written by torch {saved['torch']}, and this is torch {now['torch']}.")
    if differ := _differences(saved["config"], now["config"]):
        more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise InputError(
            f"{path} is of another run, of {saved['arm']}: {'; '.join(differ[:SHOWN])}{more}. "
            "trainer.init_from takes its weights alone."
        )
    for name, value in now["hashes"].items():
        if saved["hashes"][name] != value:
            words = name.replace("_", " ")
            raise InputError(f"{path} was written with other {words} (hash {saved['hashes'][name]}, now {value}).")
    position, metrics = state["position"], folder / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_size < position["metrics_bytes"]:
        raise InputError(f"{metrics} has lost lines that were there when {path.name} was written.")
    if hash_of(metrics, position["metrics_bytes"]) != position["metrics_hash"]:
        raise InputError(f"{metrics} holds other lines than when {path.name} was written.")


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
