"""One training step examined: looked at, measured, blamed and healed.

Knows the order of things: named causes first, then settings that heal by themselves, then what has to stay in float32.
Refuses to know configs, files and words.
"""

import copy
import glob
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from precision_lab.arm_schema import Dtype, PrecisionConfig
from precision_lab.config import as_values
from precision_lab.diagnosis.attribution import HURT_DB, Attribution, attribute, hurt, kept_of, restored
from precision_lab.diagnosis.causes import Cause
from precision_lab.diagnosis.local import LocalError
from precision_lab.diagnosis.patient import NoGradient, Outcome, Patient
from precision_lab.diagnosis.preflight import look, no_gradient, optimizer_state, wrong_dtypes
from precision_lab.diagnosis.updates import BuildOptimizer, Updates, updates
from precision_lab.task import Task

_SCALES = (2.0**16, 2.0**24, 2.0**32, 2.0**40)  # a scaler grows to these, given time
_LEAST_SCALE = 2.0**-40


@dataclass
class Diagnosis:
    """All that an examination found. `cure` is the arm that heals; None where none does, or nothing is wrong.

    `culprits` are names, the first the most to blame: modules, operations, settings, parameters.
    """

    healthy: bool
    causes: list[Cause] = field(default_factory=list)
    culprits: list[str] = field(default_factory=list)
    cure: PrecisionConfig | None = None
    plain: Outcome | None = None
    healed: Outcome | None = None
    attribution: Attribution | None = None
    updates: Updates | None = None
    local: list[LocalError] = field(default_factory=list)  # worst first
    patient: Patient | None = None

    def excess(self, outcome: Outcome | None) -> float | None:
        """In dB; None where there is no such outcome."""
        return self.patient.excess(outcome) if self.patient and outcome else None


def examine(
    model: nn.Module, task: Task, batch: Any, precision: PrecisionConfig, target: str, optimizer: BuildOptimizer
) -> Diagnosis:
    """Examine one step of `model` on `batch` in the arm `precision` of the device `target`.

    Parameters in another dtype than the arm's are a finding, and are taken to float32 in place for the rest. Raises
    what the step raises in float32, and InputError where it is not finite there.
    """
    certain = wrong_dtypes(model, precision)
    if certain:
        model.float()
    try:
        patient = Patient(model, task, batch, precision, target)
    except NoGradient:
        causes = [*certain, *no_gradient(model, task, batch)]
        return Diagnosis(False, causes, [cause.where for cause in causes])
    found = Diagnosis(healthy=not certain, causes=certain, culprits=[cause.where for cause in certain], patient=patient)
    found.plain = patient.arm()
    if not _healed_by_a_setting(found, optimizer) and not patient.pure:
        _attribute(found)
    found.causes += look(patient)
    if patient.pure:
        found.causes += optimizer_state(copy.deepcopy(model).to(patient.dtype), optimizer)
    return found


def _attribute(found: Diagnosis) -> None:
    blamed = found.attribution = attribute(found.patient, found.plain)
    found.local = blamed.local
    if not blamed.healthy:
        found.healthy = False
        found.culprits += [unit.label for unit, _ in blamed.culprits]
        found.healed = blamed.healed
        if blamed.cure:
            kept, precision = kept_of(blamed.cure), found.patient.precision
            modules = [*precision.fp32_modules, *map(glob.escape, kept.modules)]
            ops = [*precision.fp32_ops, *kept.ops]
            found.cure = replace(precision, fp32_modules=modules, fp32_ops=ops)


def overrides(before: PrecisionConfig, after: PrecisionConfig) -> list[str]:
    """What train.py takes to make the one arm of the other."""
    changed = [one.name for one in fields(before) if getattr(before, one.name) != getattr(after, one.name)]
    return [f"precision.{name}={_written(as_values(getattr(after, name)))}" for name in changed]


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(name: str) -> str:
    """A name as an override writes it: 0.10 would be a number."""
    return name if re.fullmatch(r"[A-Za-z_*][A-Za-z0-9_.*-]*", name) else json.dumps(name, ensure_ascii=False)


def _healed_by_a_setting(found: Diagnosis, optimizer: BuildOptimizer) -> bool:
    """Whether the arm's own settings are to blame: then found says so, and which heal it."""
    patient = found.patient
    if patient.pure:
        found.updates = updates(patient, optimizer)
    lost = found.updates is not None and found.updates.excess > HURT_DB
    if not lost and not hurt(patient, found.plain):
        return False
    for name, precision in _settings(patient, found.plain):
        other = patient.under(precision)
        healed = other.arm()
        if restored(other, healed):
            found.healthy, found.healed, found.cure = False, healed, _with_scale(precision, healed.scale)
            found.culprits.append(name)
            return True
    found.healthy = found.healthy and not patient.pure
    return False


def _settings(patient: Patient, plain: Outcome) -> Iterable[tuple[str, PrecisionConfig]]:
    """Settings that may be to blame, each with the arm that has another."""
    precision = patient.precision
    if precision.autocast_dtype is None:
        mixed = replace(precision, param_dtype=Dtype.float32, autocast_dtype=precision.param_dtype)
        yield "precision.param_dtype", mixed
    elif precision.autocast_dtype is Dtype.float16:
        scaled = replace(precision, grad_scaling=True)
        if not precision.grad_scaling:
            yield "precision.grad_scaling", scaled
        name = "precision.init_scale" if precision.grad_scaling else "precision.grad_scaling"
        for scale in _SCALES:
            if scale > precision.init_scale and not patient.overflows_backward(plain):
                yield name, replace(scaled, init_scale=scale, min_scale=scale)  # this one, and no smaller
        if patient.overflows_backward(plain):
            yield "precision.min_scale", replace(precision, min_scale=_LEAST_SCALE)


def _with_scale(precision: PrecisionConfig, scale: float) -> PrecisionConfig:
    """The arm, beginning with the loss scale that heals it."""
    if not precision.grad_scaling:
        return precision
    return replace(precision, init_scale=scale, min_scale=min(scale, 1.0))
