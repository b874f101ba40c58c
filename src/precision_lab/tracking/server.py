"""The runs of a W&B project through W&B's public API: listed in light pages, asked for in full where not kept.

Which server, with what login and how many seconds one answer is waited for are W&B's own settings: WANDB_BASE_URL,
WANDB_API_KEY, WANDB_HTTP_TIMEOUT. No torch, and wandb only when a project is read.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from precision_lab.errors import InputError, require
from precision_lab.tracking.mirror import PATIENCE
from precision_lab.tracking.patience import Worker
from precision_lab.tracking.runs import FILES, Kept, Told, told_of

PAGE = 50
HOW = "write wandb:entity/project, or wandb:entity/project?precision=bf16&seed=0,1 to choose among its runs"
# What is said of a run itself, by W&B's names for a filter; any other key is one of the run's config.
ATTRIBUTES = {"state": "state", "group": "group", "tag": "tags", "tags": "tags", "jobType": "jobType"}
ATTRIBUTES |= {name: name for name in ("name", "display_name", "username")}
GOING_ON = ("running", "pending", "preempting")
_NAME = r"[^/\\#?%:\x00-\x1f]{1,128}"
_SOURCE = re.compile(rf"wandb:({_NAME})/({_NAME})(\?.*)?", re.DOTALL)


@dataclass(frozen=True)
class Project:
    """`filters` are in W&B's words, MongoDB's; `text` is the source as typed."""

    text: str
    entity: str
    project: str
    filters: dict[str, Any]


def project_of(text: str) -> Project:
    """What `wandb:entity/project?key=value,other&key=value` names. InputError where it is none."""
    match = _SOURCE.fullmatch(text)
    require(match is not None, f"{text} names no W&B project; {HOW}.")
    entity, project, query = match.groups()
    conditions = [_condition(text, one) for one in query[1:].split("&")] if query else []
    return Project(text, entity, project, {"$and": conditions} if conditions else {})


def _condition(text: str, written: str) -> dict[str, Any]:
    key, _, values = written.partition("=")
    wanted = [unquote(one) for one in values.split(",")]
    require(bool(key) and all(wanted), f"{text}: {written or 'nothing'} is no filter; {HOW}.")
    if key in ATTRIBUTES:
        return {ATTRIBUTES[key]: {"$in": wanted}}
    # `0` may be a number and may be the text of one, as a commit can be: either fits.
    return {f"config.{key}": {"$in": [reading for one in wanted for reading in _readings(one)]}}


def _readings(text: str) -> list[Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return [text]
    return [text] if isinstance(value, str | list | dict) else [value, text]


def runs_of(asked: Project, kept: Kept) -> list[Told]:
    """What the project's runs of our job types tell.

    InputError where there is no login, project or answer, if the answer is none of W&B's, and if no run fits.
    """
    wandb = loaded()
    try:
        with _own_folder():
            api = wandb.Api(overrides={"entity": asked.entity})
            return list(_told(asked, api, kept))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{asked.text} cannot be read: {why(asked.entity, asked.project, error)}") from error
    finally:
        close(wandb)


def loaded() -> Any:
    """The package, which asks for no login, and looks up no host but the server."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # both are read when it is loaded
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb


def close(wandb: Any) -> None:
    """End W&B's process. Where a request had no answer it may not end (0.31), and would be waited for to the last."""
    worker = Worker()
    with suppress(Exception):
        worker.do(wandb.teardown, PATIENCE["teardown"])
    worker.end()


@contextmanager
def _own_folder() -> Iterator[None]:
    """W&B makes an empty folder for every run that it lists: one that goes when they are read."""
    before = os.environ.get("WANDB_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WANDB_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["WANDB_DIR"]
            if before is not None:
                os.environ["WANDB_DIR"] = before


def _told(asked: Project, api: Any, kept: Kept) -> Iterator[Told]:
    path, server = f"{asked.entity}/{asked.project}", api.settings["base_url"]
    listed: dict[str, Any] = {}
    for run in api.runs(path, filters=asked.filters, per_page=PAGE):
        require(run.id not in listed, f"{asked.text} cannot be read: its server sends the same run twice.")
        listed[run.id] = run
    require(
        bool(listed) or not asked.filters,
        f"{asked.text} fits no run of the project; keys are {', '.join(ATTRIBUTES)}, and those of a run's config, "
        "such as precision, model, host or seed.",
    )
    ours = {run_id: run for run_id, run in listed.items() if isinstance(run.job_type, str) and run.job_type in FILES}
    stamps = {run_id: [run.state, run.heartbeat_at] for run_id, run in ours.items()}
    places = {run_id: f"wandb:{path}/{run_id}" for run_id in ours}
    keys = {run_id: f"{server} {place}" for run_id, place in places.items()}
    told = {run_id: kept.find(place, keys[run_id], stamps[run_id]) for run_id, place in places.items()}
    missing = [run_id for run_id, known in told.items() if known is None]
    for start in range(0, len(missing), PAGE):
        wanted = missing[start : start + PAGE]
        for run in api.runs(path, filters={"name": {"$in": wanted}}, per_page=PAGE, lazy=False):
            if run.id not in wanted:
                continue
            told[run.id] = made = told_of(places[run.id], run.id, run.job_type, run.config, run.summary_metrics)
            if run.state not in GOING_ON:
                kept.keep(made, keys[run.id], [run.state, run.heartbeat_at])
    for run_id, known in told.items():
        lost = "W&B lists it, and does not send it"
        yield known or Told(places[run_id], run_id, FILES[ours[run_id].job_type], None, [], lost)


def why(entity: str, project: str, error: Exception) -> str:
    """A sentence on what W&B's library raised."""
    lines = str(error).strip().split("\n")
    said = lines[0].removeprefix("input: ").rstrip(".") or type(error).__name__
    if "did not respond in time" in said:
        return "its server does not answer. WANDB_BASE_URL says which one it is, WANDB_HTTP_TIMEOUT how long to wait."
    if "No API key" in said:
        return "there is no W&B login here. Run `wandb login`, or set WANDB_API_KEY."
    if said.startswith("Could not find project"):
        return f"its server knows no project {entity}/{project}, or does not show it to this login."
    if type(error).__name__ == "ValidationError":  # pydantic's, of W&B's settings: how many, then which, then why
        return f"W&B's own settings are wrong ({': '.join(line.strip() for line in lines[1:3])})."
    if type(error).__module__.startswith("wandb."):
        return f"{said}."
    return f"its server's answer is none of W&B's ({type(error).__name__}: {said})."
