"""The op map of one training step on a target: predicted on the CPU, real where the target is here.

Knows how a step is built for a target, and what is told, stored and mirrored of its map. Refuses to know how operations
are taken down (`probe.ops`) and what a policy does to them (`emulation`). Trains nothing.
"""

import dataclasses
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precision_lab import folders, hardware, identity, open_sets
from precision_lab.arm_schema import PrecisionConfig, Target
from precision_lab.assemble import Resolved, assemble, make_trainer, resolve, training_batches
from precision_lab.config import Config, DeviceType, as_values
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.environment import environment_of
from precision_lab.errors import InputError, require
from precision_lab.precision import release
from precision_lab.probe.op_rows import Difference, OpRow, as_record, differences, outputs_of
from precision_lab.probe.op_tables import agreement, filled, render, render_differences, summary
from precision_lab.probe.ops import op_map
from precision_lab.recorder import storable, write_whole
from precision_lab.redaction import redact, secrets_in
from precision_lab.settings import InspectOpsConfig
from precision_lab.tracking.words import mirror_of
from precision_lab.trainer import Trainer

COLUMNS = ["target", "kind", *(one.name for one in dataclasses.fields(OpRow))]  # of the table in W&B


@dataclass(frozen=True)
class OpMap:
    """The operations of one step under the autocast policy of `target`, and what there is to say of them.

    `kind` is "predicted" or "real". `differences`, predicted first, is None where the target is not here.
    """

    target: str
    kind: str
    rows: list[OpRow]
    notes: list[str] = field(default_factory=list)
    differences: list[Difference] | None = None
    compared: int = 0


def inspect_ops(asked: Config, settings: InspectOpsConfig, width: int, words: list[str]) -> None:
    """Print the map of the first training batch, or where those of two targets differ; store it and mirror it.

    InputError for what cannot be looked at; `words` are those of the command line, searched for secrets.
    """
    require(
        not asked.device.compile,
        "A compiled model cannot be looked at operation by operation; drop device.compile=true.",
    )
    targets = settings.diff or [settings.target or (asked.precision.emulate and asked.precision.emulate.name)]
    maps = [predicted(asked, target) if target else real(asked, asked.device.type) for target in targets]
    if not settings.diff and maps[0].kind == "predicted":
        maps[0] = _compared_with_real(asked, maps[0])
    print(_text(asked, settings, maps, width))
    secrets = secrets_in(os.environ, as_values(asked), words)
    for path in _written(asked, maps, secrets):
        print(f"written: {path}")
    _mirror(asked, maps, secrets)


def predicted(asked: Config, target: str) -> OpMap:
    """The map of `target`, computed on the CPU under its policy and with its rounding, whether or not it is here."""
    arm = asked.precision
    require(arm.name != "auto", f"precision=auto is chosen by the device, and {target} is not run on; name one.")
    require(
        arm.emulate is None or arm.emulate.name == target,
        f"precision.emulate={arm.emulate and arm.emulate.name} and target={target} are different devices; leave "
        "precision.emulate out.",
    )
    on_cpu = replace(asked, device=replace(asked.device, type=DeviceType.cpu))
    resolved = resolve(replace(on_cpu, precision=_emulating(arm, target)))
    return OpMap(target, "predicted", _rows(resolved, target)[0])


def _emulating(arm: PrecisionConfig, target: str) -> PrecisionConfig:
    low = arm.autocast_dtype or arm.param_dtype.name != "float32"
    return replace(arm, emulate=Target[target]) if low else arm


def real(asked: Config, device: DeviceType) -> OpMap:
    """The map by torch's own kernels on a device that is here.

    On a CPU without units for the arm's dtype, matmuls and the like are computed in float32 and rounded, which changes
    no dtype and takes seconds where it would take minutes.
    """
    asked = replace(asked, device=replace(asked.device, type=device), precision=replace(asked.precision, emulate=None))
    resolved = resolve(asked)
    rows, notes = _rows(resolved, resolved.device.type)
    return OpMap(resolved.device.type, "real", rows, [*resolved.notes, *notes])


def _compared_with_real(asked: Config, made: OpMap) -> OpMap:
    """With the differences to the real map, if the target is here and the device asked for is no other."""
    device = DeviceType[made.target]
    try:
        hardware.select_device(replace(asked.device, type=device))
    except InputError:
        return made
    if asked.device.type not in (DeviceType.auto, device):
        return made
    other = real(asked, device).rows
    found = differences(made.rows, other)
    return replace(made, differences=found, compared=len({*outputs_of(made.rows), *outputs_of(other)}))


def _rows(resolved: Resolved, target: str) -> tuple[list[OpRow], list[str]]:
    """The map, and the notes of what was built for it."""
    ready = assemble(resolved)
    rows = rows_of_a_step(make_trainer(ready), next(training_batches(ready)), resolved, target)
    return rows, ready.notes


def rows_of_a_step(trainer: Trainer, batch: Any, resolved: Resolved, target: str) -> list[OpRow]:
    """The map of a step on `batch`, which is not taken. InputError for what the step raises."""
    policy = trainer.policy
    trainer.model.train()

    def forward() -> Tensor:
        with policy.autocast():
            return trainer.task(trainer.model, batch)[0]

    slow = bool(resolved.emulated) and policy.device.type == "cpu"
    try:
        with WideArithmetic() if slow else nullcontext(), policy.arithmetic():
            rows = op_map(trainer.model, forward, fused=target != policy.device.type)
        policy.check_float32()
        return rows
    except InputError:
        raise
    except Exception as error:  # the model's or the task's
        told = str(error).strip().split("\n")[0].rstrip(".")
        where = f" at {error.__notes__[0]}" if getattr(error, "__notes__", ()) else ""
        label = _label(resolved.asked)
        raise InputError(f"{label} on {target}: the step raised {type(error).__name__}{where}: {told}.") from error
    finally:
        release()


def _label(asked: Config) -> str:
    """The arm's, without the target, which is told beside it."""
    return identity.arm_label(replace(asked.precision, emulate=None))


def _text(asked: Config, settings: InspectOpsConfig, maps: list[OpMap], width: int) -> str:
    arm, by_module = _label(asked), settings.by == "module"
    torch_version = torch.__version__.partition("+")[0]
    policy = f"predicted by the autocast lists of torch {torch_version}"
    names = tuple(one.target for one in maps)
    if settings.diff:
        found = differences(maps[0].rows, maps[1].rows)
        what = (
            "dtypes that operations give" if found else f"all operations give the same dtypes on {' and '.join(names)}"
        )
        head = [f"{arm} on {' and '.join(names)}, one training step, {policy}: {what}", ""]
        table = [render_differences(found, names, by_module=by_module, width=width)] if found else []
        sums = [f"{one.target}: {sentence}" for one in maps for sentence in summary(one.rows)]
        return "\n".join([filled(head, width), *table, filled(sums, width)])
    (one,) = maps
    how = policy if one.kind == "predicted" else f"as it ran here with torch {torch_version}"
    head = [*one.notes, f"{arm} on {one.target}, one training step, {how}", ""]
    body = render(one.rows, by_module=by_module, width=width).rstrip()
    told = [] if one.differences is None else [agreement(one.target, one.differences, one.compared)]
    return "\n".join([filled(head, width), body, *([filled(told, width)] if told else [])])


def _written(asked: Config, maps: list[OpMap], secrets: list[str]) -> list[Path]:
    """Each map as `probe/ops_<target>.json` in a new folder."""
    folder = folders.timed_folder(asked, "inspections") / "probe"
    folder.mkdir()
    paths = []
    for one in maps:
        record = {
            **as_record(one.rows),
            "target": one.target,
            "kind": one.kind,
            "differences_to_real": one.differences and [dataclasses.asdict(found) for found in one.differences],
            "compared_with_real": one.compared,
            "arm": identity.arm_label(asked.precision),
            "model": open_sets.label(asked.model),
            "dataset": open_sets.label(asked.dataset),
            "torch": torch.__version__,
            "config": as_values(asked),
        }
        paths.append(folder / f"ops_{one.target}.json")
        write_whole(paths[-1], json.dumps(storable(redact(record, secrets)), allow_nan=False) + "\n")
    return paths


def _mirror(asked: Config, maps: list[OpMap], secrets: list[str]) -> None:
    environment = redact(environment_of(torch.device("cpu")), secrets)
    mirror = mirror_of(asked, maps[0].target, environment, secrets, job_type="inspect")
    rows = [row for one in maps for row in table_rows(one.target, one.kind, one.rows)]
    mirror.table("op_map", COLUMNS, rows)
    mirror.finish("completed", None, {})


def table_rows(target: str, kind: str, rows: list[OpRow]) -> list[list[Any]]:
    """A map as plain values, by COLUMNS."""
    return [[target, kind, *map(_plain, dataclasses.astuple(row))] for row in rows]


def _plain(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, tuple) else value
