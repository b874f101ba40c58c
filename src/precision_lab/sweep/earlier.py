"""What a sweep finds in its folder that the same command would not give today: other code, other defaults. No torch."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from precision_lab import folders, identity
from precision_lab.code import code_of
from precision_lab.config import as_values
from precision_lab.redaction import redact, secrets_in
from precision_lab.sweep.plan import Job

NOT_ABOUT_THE_RUN = ("rerun=", "on_error=", "on_unsupported=")  # overrides that tell a sweep what to do
SHOWN = 6  # differences of a line at most


def what_differs(jobs: list[Job]) -> list[str]:
    """A line for finished jobs that other code made, and one for jobs whose settings changed since they were run."""
    code = [_code_then_and_now(job) for job in jobs if job.before]
    settings = list(_settings_then_and_now([job for job in jobs if job.status == "waiting"]))
    return [
        *_line("{} finished {jobs} run with other code ({}); rerun=all runs {them} again.", code),
        *_line("{} {jobs} run before by the same command with other settings ({}), and will be run anew.", settings),
    ]


def _line(template: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """The template with the number of jobs of which something differs, and what differs."""
    each = [
        [f"{key} {then}, now {now}" for key, then, now in identity.differing(*then_and_now)] for then_and_now in pairs
    ]
    count = sum(map(bool, each))
    told = list(dict.fromkeys(difference for some in each for difference in some))
    if len(told) > SHOWN:
        told[SHOWN:] = [f"and {len(told) - SHOWN} more"]
    words = {"jobs": "job was", "them": "it"} if count == 1 else {"jobs": "jobs were", "them": "them"}
    return [template.format(count, "; ".join(told), **words)] if count else []


def _code_then_and_now(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    return _part(folders.read_json(job.folder / "result.json"), "code"), code_of(job.asked)


def _settings_then_and_now(jobs: list[Job]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    stored = _results({job.folder.parent for job in jobs})
    for job in jobs:
        asked, secrets = job.asked, secrets_in(os.environ, as_values(job.asked), job.overrides)
        command = _said(redact(job.overrides, secrets)), identity.arm_label(asked.precision), asked.seed
        earlier = stored.get(command)
        if earlier and earlier["run_signature"] != identity.run_signature(asked):
            yield tuple(_settings(redact(values, secrets)) for values in (earlier["config"], as_values(asked)))


def _results(sweeps: Iterable[Path]) -> dict[tuple[frozenset[str], str, int], dict[str, Any]]:
    """Of each command, arm and seed the newest finished run that the sweeps' folders hold."""
    found: dict[Any, dict[str, Any]] = {}
    results = [folders.read_json(path) for sweep in sweeps for path in sorted(sweep.glob("*/result.json"))]
    whole = [one for one in results if one.get("status") in folders.RESULTS and _is_whole(one)]
    for one in sorted(whole, key=lambda one: one["finished"]):
        found[_said(one["overrides"]), one["arm"], one["seed"]] = one
    return found


def _is_whole(result: dict[str, Any]) -> bool:
    """Whether a file that anybody may have changed holds what is asked of it."""
    kinds = {"overrides": list, "arm": str, "seed": int, "finished": int | float, "config": dict, "run_signature": str}
    return all(isinstance(result.get(key), kind) for key, kind in kinds.items()) and all(
        isinstance(word, str) for word in result["overrides"]
    )


def _said(overrides: list[str]) -> frozenset[str]:
    return frozenset(word for word in overrides if not word.startswith(NOT_ABOUT_THE_RUN))


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a run's signature is made of, flat: `optimizer.lr`. The seed is the same by choice."""
    places = {key: value for key, value in _part(config, "dataset").items() if key in ("root", "path")}
    counted = {**identity.counted(config), "precision": identity.counted_arm(_part(config, "precision"))}
    return identity.flat(counted) | identity.flat({"dataset": places})


def _part(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}
