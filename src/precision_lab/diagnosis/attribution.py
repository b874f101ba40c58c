"""Who is to blame: the smallest set of modules and operations that, kept in float32, restores the gradient.

Delta debugging (Zeller and Hildebrandt 2002) on a ranking: what loses most by itself is kept first, one, two, four and
so on until the gradient is restored, and what is not needed of these is let go again. At most 8 + 4 log2(modules) sets
are tried; what is found by then is enough, if not always the least.
Knows when a gradient counts as hurt and as restored; refuses to know why, and what to tell the user.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from precision_lab.diagnosis.local import LocalError, LocalErrors
from precision_lab.diagnosis.patient import Kept, Outcome, Patient
from precision_lab.emulation.lists import Cast, policy_of

HURT_DB, RESTORED_DB, GAIN_DB = 10.0, 7.0, 10.0
_LARGE = 0.25  # share of the modules that run beyond which a module is no answer where an operation is one
_SUSPECTS = 4  # tried together at most where the gradient as a whole is not hurt
_NEARBY = 2  # other weights on which an arm is tried that may be hurt by chance
_LEAST_TRIES, _TRIES = 8, 4  # sets that are tried at most: so many, and so many times log2(modules)
_FAILURES = 8  # exceptions, one behind the other, that are followed


@dataclass(frozen=True)
class Unit:
    """Something that can be kept in float32: a module with all in it, or, with `op`, an operation wherever it is."""

    module: str
    op: str | None = None

    @property
    def label(self) -> str:
        return self.op or self.module


@dataclass
class Attribution:
    """What the search found. `culprits` come first in the order of blame; `cure` is None where nothing heals."""

    healthy: bool
    plain: Outcome
    culprits: list[tuple[Unit, LocalError | None]] = field(default_factory=list)
    cure: list[Unit] | None = None
    healed: Outcome | None = None
    failed: tuple[str, str] | None = None  # the module and operation that raised first
    local: list[LocalError] = field(default_factory=list)  # of every operation, worst first
    units: int = 0
    tried: list[tuple[list[str], float]] = field(default_factory=list)  # what was kept, and the excess in dB


def attribute(patient: Patient, plain: Outcome) -> Attribution:
    """Judge the patient's step by what it gave in the arm, and look for the cure where it is hurt."""
    if hurt(patient, plain) and plain.finite:
        patient.refine_floor()
    search = _Search(patient, plain)
    search.allow_for_chance()
    return search.cure() if hurt(patient, plain) else search.amplifier()


def hurt(patient: Patient, outcome: Outcome) -> bool:
    """Whether the gradient is worse than the number format explains, lacks a part, or anything overflows."""
    return not outcome.finite or bool(outcome.without_gradient) or patient.excess(outcome) > HURT_DB


def restored(patient: Patient, outcome: Outcome) -> bool:
    """Whether nothing is left of it."""
    return outcome.finite and not outcome.without_gradient and patient.excess(outcome) < RESTORED_DB


class _Search:
    def __init__(self, patient: Patient, plain: Outcome):
        self.patient, self.found = patient, Attribution(healthy=True, plain=plain)
        self._outcomes: dict[frozenset[Unit], Outcome] = {frozenset(): plain}
        self._errors = patient.local_errors()

    def allow_for_chance(self) -> None:
        """A rounding that turns over a ReLU or two may hurt the gradient of a small net, where no operation does.

        Where that is so, the arm does no harm on weights that are off by a rounding, and what it gives on these counts
        among the floors.
        """
        patient, plain = self.patient, self.found.plain
        suspect = hurt(patient, plain) and plain.finite and not plain.without_gradient
        suspect = suspect and not any(self._grows(row) for row in self._errors.rows())
        if suspect and any(patient.excess_nearby(draw) < HURT_DB for draw in range(_NEARBY)):
            patient.floor = min(patient.floor, plain.sqnr)

    def cure(self) -> Attribution:
        """Of a step that is hurt."""
        self.found.healthy = False
        base, errors = self._follow_failures()
        base += [unit for unit in self._where_the_graph_ends() if unit not in base]
        base += [unit for unit in self._first_not_finite(errors) if unit not in base]
        ranked = base + [unit for unit in self._ranked(errors) if unit not in base]
        self.found.units = len(ranked)
        enough = self._one_operation(errors) or shortest(ranked, max(1, len(base)), self._restores)
        if enough:
            self._settle(smallest(enough, self._restores), errors)
            self._name_the_worst(ranked[0], errors)
        else:
            self._blame(ranked[:_SUSPECTS], errors)
        return self.found

    def amplifier(self) -> Attribution:
        """Of a step that is not hurt: a module that makes rounding grow lowers what the number format alone gives, too.

        A finding only where one module alone, less than half of the net, makes more of rounding than one rounding is,
        and gains more than GAIN_DB in float32.
        """
        errors = self._errors
        grown = {row.module for row in errors.rows() if self._grows(row)}
        ranked = self._ranked(errors)
        self.found.units = len(ranked)
        suspects = [unit for unit in ranked if unit.op is None and unit.module in grown and self._share(unit) < 0.5]
        suspects = suspects[:_SUSPECTS]
        if suspects and self._gains(suspects):
            alone = smallest(suspects, self._gains)
            if len(alone) == 1:
                self.found.healthy = False
                self._settle(alone, errors)
        return self.found

    def _settle(self, cure: list[Unit], errors: LocalErrors) -> None:
        cure = self._narrowed(cure, errors)
        self.found.cure, self.found.healed = cure, self._outcome(cure)
        self._blame(cure, errors)

    def _name_the_worst(self, first: Unit, errors: LocalErrors) -> None:
        """What is worst by itself is named first, in the cure or not, where it loses values that float32's own inputs
        give, or where nothing in the cure has a large error: that is the place of a cure, and no culprit. Kept early, a
        module hands float32 on to all that comes behind it."""
        worst = max(errors.rows(), key=_badness, default=None)
        named = [unit for unit, _ in self.found.culprits]
        raises = _unit(*self.found.failed) if self.found.failed else None
        if raises and raises not in named:
            self.found.culprits.insert(0, (raises, None))
            return
        if worst is None or first in named or _unit(worst.module, worst.op) != first:
            return
        if worst.nonfinite or (
            self._grows(worst) and not any(row and self._grows(row) for _, row in self.found.culprits)
        ):
            self.found.culprits.insert(0, (first, worst))

    def _grows(self, row: LocalError) -> bool:
        """Whether an operation makes more of rounding than one rounding is."""
        return bool(row.nonfinite) or row.error > 10 ** ((GAIN_DB - self.patient.one_rounding) / 10)

    def _narrowed(self, cure: list[Unit], errors: LocalErrors) -> list[Unit]:
        """Where a module with others in it is a large part of the net: those of its own operations that do, if any."""
        restores = self._restores if hurt(self.patient, self.found.plain) else self._gains
        for unit in cure:
            rows = sorted((row for row in errors.rows() if row.module == unit.module), key=_badness, reverse=True)
            inside = list(dict.fromkeys(Unit(row.module, row.op) for row in rows if _keepable(row.op)))
            within = any(name.startswith(f"{unit.module}.") for name in self.patient.ran)
            if unit.op is None and within and inside and self._share(unit) > _LARGE:
                others = [one for one in cure if one != unit]
                enough = shortest(inside, 1, lambda ops, others=others: restores([*others, *ops]))
                cure = smallest([*others, *enough], restores) if enough else cure
        return cure

    def _follow_failures(self) -> tuple[list[Unit], LocalErrors]:
        """Keep where an exception comes from, until none comes; what is known of the errors of the rest."""
        base: list[Unit] = []
        errors = self._errors
        self.found.failed = errors.failed
        for _ in range(_FAILURES):
            if errors.failed is None:
                break
            unit = _unit(*errors.failed)
            if unit is None or unit in base or not self._can_be_kept(unit):
                break
            base.append(unit)
            if not self._outcome(base).raised and self._restores(base):
                break
            errors = self.patient.local_errors(kept_of(base))
        return base, errors

    def _where_the_graph_ends(self) -> list[Unit]:
        """The module that ran next after the last of which a parameter lacks its gradient: it does not hand it on."""
        ran = self.patient.ran
        cut_off = {name.rpartition(".")[0] for name in self.found.plain.without_gradient}
        last = max((place for place, name in enumerate(ran) if name in cut_off), default=None)
        return [Unit(name) for name in ran[last + 1 : last + 2]] if last is not None else []

    def _first_not_finite(self, errors: LocalErrors) -> list[Unit]:
        """Where no operation loses values by itself: the module whose output first has some that float32 has not."""
        lost = any(row.nonfinite for row in errors.rows())
        return [Unit(name) for name in self.found.plain.nonfinite[:1] if name and not lost]

    def _one_operation(self, errors: LocalErrors) -> list[Unit] | None:
        """The worst operation, if it is to blame in several modules and heals them all.

        Not one that low precision is there to speed up.
        """
        rows = [row for row in sorted(errors.rows(), key=_badness, reverse=True) if self._grows(row)]
        op = rows[0].op if rows else ""
        several = len({row.module for row in rows if row.op == op}) > 1
        sped_up = {
            name.partition(".")[0] for name, cast in policy_of(self.patient.target).items() if cast is Cast.lower
        }
        fit = several and op not in sped_up and _keepable(op)
        return [Unit("", op)] if fit and self._restores([Unit("", op)]) else None

    def _ranked(self, errors: LocalErrors) -> list[Unit]:
        """By what each loses itself: what overflows first, in the order of the step, then the largest errors."""
        self.found.local = sorted(errors.rows(), key=_badness, reverse=True)
        worst: dict[Unit, tuple] = {}
        for row in errors.rows():
            unit = _unit(row.module, row.op)
            if unit is not None:
                worst[unit] = max(worst.get(unit, (0, 0)), _badness(row))
        return sorted(filter(self._can_be_kept, worst), key=worst.__getitem__, reverse=True)

    def _can_be_kept(self, unit: Unit) -> bool:
        """A TorchScript module keeps its own dtypes."""
        return not isinstance(self.patient.model.get_submodule(unit.module), torch.jit.ScriptModule)

    def _blame(self, units: list[Unit], errors: LocalErrors) -> None:
        rows = errors.rows()
        for unit in units:
            own = [row for row in rows if unit == _unit(row.module, row.op) or unit == Unit(row.module, row.op)]
            own = own or [row for row in rows if row.module.startswith(f"{unit.module}.") and unit.op is None]
            self.found.culprits.append((unit, max(own, key=_badness, default=None)))
        self.found.culprits.sort(key=lambda pair: _badness(pair[1]) if pair[1] else (0, 0.0), reverse=True)

    def _share(self, unit: Unit) -> float:
        """Of the modules that run, those in this one."""
        ran = self.patient.ran
        return sum(name == unit.module or name.startswith(f"{unit.module}.") for name in ran) / max(1, len(ran))

    def _affordable(self, units: Sequence[Unit]) -> bool:
        """Whether one more set may be tried: what is not found by then is not small."""
        most = _LEAST_TRIES + _TRIES * math.ceil(math.log2(self.found.units + 1))
        return frozenset(units) in self._outcomes or len(self.found.tried) < most

    def _restores(self, units: Sequence[Unit]) -> bool:
        if not self._affordable(units):
            return False
        outcome = self._outcome(units)
        if outcome.finite and not restored(self.patient, outcome):
            self.patient.refine_floor()
        return restored(self.patient, outcome)

    def _gains(self, units: Sequence[Unit]) -> bool:
        return self._affordable(units) and self._outcome(units).sqnr - self.found.plain.sqnr > GAIN_DB

    def _outcome(self, units: Sequence[Unit]) -> Outcome:
        key = frozenset(units)
        if key not in self._outcomes:
            outcome = self._outcomes[key] = self.patient.arm(kept_of(units))
            self.found.tried.append(([unit.label for unit in units], self.patient.excess(outcome)))
        return self._outcomes[key]


def shortest(ranked: list[Unit], size: int, enough: Callable[[list[Unit]], bool]) -> list[Unit] | None:
    """The shortest that is enough of the beginnings of a ranking, with `size` units and doubled from there."""
    while not enough(ranked[:size]):
        if size >= len(ranked):
            return None
        size *= 2
    return ranked[:size]


def smallest(units: list[Unit], enough: Callable[[list[Unit]], bool]) -> list[Unit]:
    """A part of `units` that is still enough, and of which nothing can be left out."""
    pieces = 2
    while len(units) > 1:
        size = math.ceil(len(units) / pieces)
        parts = [units[i : i + size] for i in range(0, len(units), size)]
        rests = [[unit for unit in units if unit not in part] for part in parts]
        for found in (*parts, *(rests if len(parts) > 2 else ())):
            if found and len(found) < len(units) and enough(found):
                units, pieces = found, 2
                break
        else:
            if size == 1:
                break
            pieces = min(len(units), 2 * pieces)
    return units


def kept_of(units: Sequence[Unit]) -> Kept:
    """What keeps these in float32."""
    return Kept(
        tuple(unit.module for unit in units if unit.op is None),
        tuple(dict.fromkeys(unit.op for unit in units if unit.op is not None)),
    )


def _unit(module: str, op: str) -> Unit | None:
    """What has to be kept so that an operation of a module is; None where nothing can be named."""
    if module:
        return Unit(module)
    return Unit("", op) if _keepable(op) else None


def _keepable(op: str) -> bool:
    packet = getattr(torch.ops.aten, op, None)
    return packet is not None and any(not getattr(packet, name)._schema.is_mutable for name in packet.overloads())


def _badness(row: LocalError) -> tuple[float, float]:
    """What sorts errors: overflow before rounding, and of overflows the first."""
    return (1.0, -row.lost_at) if row.nonfinite else (0.0, row.total)
