"""From a config to a diagnosis on disk: what was examined, what it says, and the proof.

Knows how a run is assembled and where its files go; refuses to judge.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from precision_lab import config, folders, hardware
from precision_lab.arm_schema import Dtype, PrecisionConfig, Target
from precision_lab.assemble import Assembly, Resolved, assemble, resolve, training_batches
from precision_lab.config import Config, as_values
from precision_lab.diagnosis.examine import Diagnosis, examine, overrides
from precision_lab.diagnosis.local import LocalError
from precision_lab.diagnosis.proof import time_arms, train_arms
from precision_lab.diagnosis.words import answer, lines, markdown
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.identity import arm_label, experiment_signature
from precision_lab.optim import build_optimizer
from precision_lab.precision import check_operations
from precision_lab.recorder import storable, write_whole
from precision_lab.redaction import redact, secrets_in
from precision_lab.seeds import derive, seed_globals
from precision_lab.settings import DiagnoseConfig
from precision_lab.targets import raised, refusal
from precision_lab.tracking.words import mirror_of

SCHEMA_VERSION = 1
_SHOWN = 20  # operations whose own error is kept


def told_and_kept(asked: Config, settings: DiagnoseConfig, words: list[str], width: int) -> bool:
    """Diagnose, print it in at most `width` columns, and keep it on disk and in W&B; return whether all is healthy.

    `words` are the overrides of train.py that it was asked with.
    """
    told = diagnose(asked, settings)
    secrets = secrets_in(os.environ, as_values(asked), words)
    folder = folders.timed_folder(asked, "diagnoses")
    write_whole(folder / "diagnosis.json", json.dumps(storable(redact(told, secrets)), allow_nan=False) + "\n")
    write_whole(folder / "diagnosis.md", redact(markdown(told, words), secrets))
    print(redact(lines(told, words, width), secrets))
    print(f"\nwritten: {folder}")
    _mirror(asked, told, secrets)
    return told["healthy"]


def _mirror(asked: Config, told: dict[str, Any], secrets: list[str]) -> None:
    """A run of job type diagnose: the answer, the figures, and each operation's own error as a table."""
    environment = redact(environment_of(torch.device("cpu")), secrets)
    mirror = mirror_of(asked, told["target"], environment, secrets, job_type="diagnose")
    columns = ["module", "op", "phase", "sqnr_db", "nonfinite", "flushed", "amax"]
    kept = redact(storable(told), secrets)
    mirror.table("local_errors", columns, [[row[column] for column in columns] for row in kept["local"]])
    cure = kept["cure"] or {}
    summary = {key: value for key, value in (kept["figures"] or {}).items() if isinstance(value, int | float)}
    summary |= {"healthy": kept["healthy"], "culprits": ", ".join(one["name"] for one in kept["culprits"])}
    summary |= {"cure": " ".join(cure.get("overrides", [])), "answer": redact(" ".join(answer(told)), secrets)}
    mirror.finish("completed", None, {f"diagnosis/{key}": value for key, value in summary.items()})


def diagnose(asked: Config, settings: DiagnoseConfig) -> dict[str, Any]:
    """Examine one step of what `asked` would train, and return all that diagnosis.json says.

    InputError for an arm without low precision, a target that this device cannot stand for, weights that have diverged,
    and what the step itself raises in float32.
    """
    started = time.time()
    check_operations(asked.precision.fp32_ops)
    with _told_of_the_checkpoint(settings.checkpoint):
        weights = settings.checkpoint or asked.trainer.init_from
        asked = replace(asked, trainer=replace(asked.trainer, init_from=weights))
        target, resolved = _meant(asked, settings.target)
        asked = resolved.asked
        ready = _assembled(resolved)
    model = ready.workload.model.to(resolved.device)
    batch = next(training_batches(ready))
    seed_globals(derive(asked.seed, "dropout"))
    model.train()
    arm = replace(asked.precision, emulate=None)
    try:
        found = examine(model, ready.workload.task, batch, arm, target, lambda m: build_optimizer(asked.optimizer, m))
    except InputError:
        raise
    except Exception as error:  # the user's model or task, in float32
        if hardware.is_out_of_memory(error):
            raise InputError(
                "One training step does not fit into memory here; set a smaller trainer.batch_size."
            ) from error
        raise refusal(error, raised("The step itself, in float32,", error)) from error
    emulates = resolved.device.type == "cpu"
    told = _told(found, arm, target, emulates) | {"proof": _proof(found, asked, ready, target, emulates, settings)}
    environment = environment_of(resolved.device)
    return {
        "schema": SCHEMA_VERSION,
        "name": asked.name,
        "arm": arm_label(arm),
        "target": target,
        "emulated": emulates,
        "checkpoint": settings.checkpoint,
        **told,
        **{key: environment[key] for key in ("fingerprint", "host", "versions", "git")},
        "experiment_signature": experiment_signature(asked),
        "hashes": ready.hashes,
        "finished": time.time(),
        "seconds": time.time() - started,
        "config": as_values(replace(asked, precision=arm)),
    }


@contextmanager
def _told_of_the_checkpoint(given: str | None) -> Iterator[None]:
    """What is said of trainer.init_from was given as checkpoint."""
    try:
        yield
    except InputError as error:
        if not given or "trainer.init_from" not in str(error):
            raise
        raise InputError(str(error).replace("trainer.init_from", "checkpoint")) from error


def _meant(asked: Config, target: str | None) -> tuple[str, Resolved]:
    """The device whose precision is meant, and what was asked of this one."""
    if asked.precision.emulate:
        raise InputError("precision.emulate is for train.py; here target= says whose precision is meant.")
    if asked.device.compile:
        raise InputError("A compiled model cannot be taken apart; drop device.compile=true.")
    if asked.precision.name == "auto":
        asked = resolve(asked).asked
    low = (asked.precision.autocast_dtype or asked.precision.param_dtype) is not Dtype.float32
    if not low:
        raise InputError(
            f"precision={asked.precision.name} holds and computes all in float32, by which others are measured; name a "
            "lower one, such as bf16 or fp16."
        )
    device = hardware.select_device(asked.device)
    target = target or device.type
    if device.type not in ("cpu", target):
        raise InputError(f"target={target} is emulated on a CPU, and the device is {device.type}; set device=cpu.")
    if device.type == "cpu":
        asked = replace(asked, precision=replace(asked.precision, emulate=Target[target]))
    return target, resolve(asked)


def _assembled(resolved: Resolved) -> Assembly:
    """With the kernels of torch: what is examined puts its own in place."""
    plain = replace(resolved, asked=replace(resolved.asked, precision=config.load_precision("fp32")), emulated=[])
    return assemble(plain)


def _told(found: Diagnosis, arm: PrecisionConfig, target: str, emulates: bool) -> dict[str, Any]:
    patient, plain, blamed = found.patient, found.plain, found.attribution
    rows = {unit.label: row for unit, row in blamed.culprits} if blamed else {}
    return {
        "healthy": found.healthy,
        "culprits": [{"name": name} | _of_row(rows.get(name)) for name in found.culprits],
        "causes": [asdict(cause) for cause in found.causes],
        "figures": {
            "dtype": str(patient.dtype).removeprefix("torch."),
            "sqnr_db": plain.sqnr,
            "floor_db": patient.floor,
            "noise_db": patient.noise,
            "bound_db": patient.bound,
            "excess_db": patient.excess(plain),
            "loss_scale": plain.scale,
            "loss_fp32": patient.loss,
            "nonfinite": plain.nonfinite,
            "without_gradient": plain.without_gradient,
            "raised": str(plain.raised).split("\n")[0] if plain.raised else None,
            "raised_in": blamed.failed if blamed else None,
            "passes": patient.passes,
            "units": blamed.units if blamed else None,
        }
        if patient
        else None,
        "cure": {
            "arm": arm_label(found.cure),
            "overrides": overrides(arm, found.cure),
            "sqnr_db": found.healed.sqnr,
            "excess_db": patient.excess(found.healed),
            "loss_scale": found.healed.scale,
        }
        if found.cure
        else None,
        "updates": asdict(found.updates) if found.updates else None,
        "tried": [{"kept": kept, "excess_db": excess} for kept, excess in blamed.tried] if blamed else [],
        "local": [_of_row(row) for row in found.local[:_SHOWN]],
    }


def _of_row(row: LocalError | None) -> dict[str, Any]:
    if row is None:
        return {}
    return asdict(row) | {"sqnr_db": -10 * math.log10(row.total) if row.total else math.inf}


def _proof(
    found: Diagnosis, asked: Config, ready: Assembly, target: str, emulates: bool, settings: DiagnoseConfig
) -> dict[str, Any] | None:
    """The cure against the arm and float32: a few steps of each, and their times where these can be taken here."""
    if not found.cure or not settings.steps:
        return None
    arms = [replace(asked.precision, emulate=None), found.cure]
    if found.plain.raised:
        arms = arms[1:]
    trained = train_arms(asked, ready.workload, target, emulates, arms, settings.steps)
    why_not = f"{target} is not here" if emulates and target != "cpu" else None
    if not why_not:
        support = hardware.dtype_support(found.patient.device)
        dtype = str(found.patient.dtype).removeprefix("torch.")
        why_not = None if support.get(dtype) == "native" else f"this CPU has no {dtype} units"
    return {
        "steps": settings.steps,
        "trained": [asdict(one) | {"loss": one.loss} for one in trained],
        "times": None if why_not else time_arms(asked, arms, settings.budget_s),
        "not_timed": why_not,
    }
