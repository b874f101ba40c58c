"""From a config to a diagnosis on disk: what was examined, what it says, and the proof.

Knows how a run is assembled and where its files go; refuses to judge.
"""

import math
import time
from dataclasses import asdict, replace
from typing import Any

from precision_lab import config, hardware
from precision_lab.arm_schema import Dtype, PrecisionConfig, Target
from precision_lab.assemble import Assembly, Resolved, assemble, resolve, training_batches
from precision_lab.config import Config, as_values
from precision_lab.diagnosis.examine import Diagnosis, examine, overrides
from precision_lab.diagnosis.local import LocalError
from precision_lab.diagnosis.proof import time_arms, train_arms
from precision_lab.environment import environment_of
from precision_lab.errors import InputError
from precision_lab.identity import arm_label, experiment_signature
from precision_lab.optim import build_optimizer
from precision_lab.seeds import derive, seed_globals
from precision_lab.settings import DiagnoseConfig
from precision_lab.targets import raised, refusal

SCHEMA_VERSION = 1
_SHOWN = 20  # operations whose own error is kept


def diagnose(asked: Config, settings: DiagnoseConfig) -> dict[str, Any]:
    """Examine one step of what `asked` would train, and return all that diagnosis.json says.

    InputError for an arm without low precision, a target that this device cannot stand for, weights that have diverged,
    and what the step itself raises in float32.
    """
    started = time.time()
    asked = replace(asked, trainer=replace(asked.trainer, init_from=settings.checkpoint or asked.trainer.init_from))
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
    return asdict(row) | {"sqnr_db": -10 * math.log10(row.error) if row.error else math.inf}


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
