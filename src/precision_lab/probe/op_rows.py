"""Op maps as plain rows: their sums, and where two of them disagree.

Knows what a row says; refuses to know how it was found. Bytes are those of tensors read and written, FLOPs those of
torch's own formulas, which exist for matmuls, convolutions and attention. No torch.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LOW = ("bfloat16", "float16")
SCHEMA_VERSION = 1
_HEAVY = re.compile(r"mm$|^(mv|addmv|dot|linear)(_backward)?$|conv(?!ert)|attention|rnn|lstm|gru")
# Kernels by which devices do the same thing, and the one name that they are compared under.
_SAME = (
    (re.compile(r"batch_norm\w*backward"), "batch_norm_backward"),
    (re.compile(r"batch_norm"), "batch_norm"),
    (re.compile(r"attention\w*backward"), "attention_backward"),
    (re.compile(r"attention"), "attention"),
    (re.compile(r"^native_dropout"), "dropout"),
)


@dataclass(frozen=True)
class OpRow:
    """One operation as one module runs it in one phase with one set of dtypes.

    `module` is the name in `model.named_modules()`, "" for the model itself and for what runs outside any module, such
    as the loss. `phase` is "forward" or "backward"; a forward that activation checkpointing repeats counts as backward.
    `op` is the aten name without overload. `inputs` and `outputs` are the distinct dtypes of the floating-point (or
    complex) tensors in order of appearance. `is_cast` marks a copy whose only purpose is another floating dtype.
    `flops` and `nbytes` are of all calls together; `flops` is None where torch has no formula. `part_of` names what is
    one kernel on one device and several on another: "attention", "dropout" or "rnn"; of the first two `given` has the
    dtypes of the result.
    """

    module: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    is_cast: bool = False
    flops: int | None = None
    nbytes: int = 0
    part_of: str = ""
    given: tuple[str, ...] = ()

    @property
    def dtypes(self) -> str:
        """`bfloat16 -> float32`"""
        return f"{', '.join(self.inputs) or '-'} -> {', '.join(self.outputs) or '-'}"


def by_operation(rows: Iterable[OpRow]) -> list[OpRow]:
    """Add up rows that differ in nothing but the module; `module` becomes ""."""
    merged: dict[tuple, OpRow] = {}
    for row in rows:
        key = (row.phase, row.op, row.inputs, row.outputs, row.is_cast)
        before = merged.get(key)
        if before is None:
            merged[key] = dataclasses.replace(row, module="", part_of="", given=())
            continue
        flops = None if row.flops is None else row.flops + (before.flops or 0)
        calls, nbytes = before.calls + row.calls, before.nbytes + row.nbytes
        merged[key] = dataclasses.replace(before, calls=calls, flops=flops, nbytes=nbytes)
    return list(merged.values())


@dataclass(frozen=True)
class Totals:
    """What one map comes to. `flops_in` is by the dtype of an operation's first input."""

    flops_in: dict[str, int]
    uncounted: dict[str, int]  # heavy operations that torch has no FLOP formula for -> calls
    casts: int
    cast_bytes: int
    all_bytes: int

    @property
    def flops(self) -> int:
        """All that is counted."""
        return sum(self.flops_in.values())

    @property
    def low_share(self) -> float | None:
        """The part of the FLOPs whose operations take float16 or bfloat16; None where nothing was counted."""
        return sum(self.flops_in.get(dtype, 0) for dtype in LOW) / self.flops if self.flops else None

    @property
    def cast_share(self) -> float:
        """Bytes that casts read and write, of those that all operations of the map read and write."""
        return self.cast_bytes / self.all_bytes if self.all_bytes else 0.0


def totals(rows: Iterable[OpRow]) -> Totals:
    """Sums over a map."""
    flops_in: dict[str, int] = {}
    uncounted: dict[str, int] = {}
    casts = cast_bytes = all_bytes = 0
    for row in rows:
        all_bytes += row.nbytes
        if row.is_cast:
            casts, cast_bytes = casts + row.calls, cast_bytes + row.nbytes
        elif row.flops:
            flops_in[row.inputs[0]] = flops_in.get(row.inputs[0], 0) + row.flops
        elif row.flops is None and _HEAVY.search(row.op):
            uncounted[row.op] = uncounted.get(row.op, 0) + row.calls
    return Totals(dict(sorted(flops_in.items(), key=lambda item: -item[1])), uncounted, casts, cast_bytes, all_bytes)


@dataclass(frozen=True)
class Difference:
    """An operation of one module that gives other dtypes in one map than in the other; none: it is not there."""

    module: str
    phase: str
    op: str
    first: tuple[str, ...]
    second: tuple[str, ...]


def differences(first: Iterable[OpRow], second: Iterable[OpRow]) -> list[Difference]:
    """Where two maps give other dtypes, by module, phase and operation.

    Casts are left out, and so are recurrent layers, whose kernels on two devices have nothing in common. Attention and
    dropout are one operation each, known by what they give in the forward. Kernels that do the same thing on different
    devices have one name.
    """
    left, right = outputs_of(first), outputs_of(second)
    for key in {*left} ^ {*right}:
        if key[2] == "dropout":  # with a probability of 0 it is an operation on CUDA and none on a CPU
            left.pop(key, None)
            right.pop(key, None)
    return [
        Difference(*key, tuple(sorted(left.get(key, ()))), tuple(sorted(right.get(key, ()))))
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key) != right.get(key)
    ]


def outputs_of(rows: Iterable[OpRow]) -> dict[tuple[str, str, str], set[str]]:
    """(module, phase, operation) -> the dtypes that it gives, as maps are compared."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        gives = row.given if row.part_of else row.outputs
        if gives and not (row.part_of and row.phase == "backward") and (row.part_of or not row.is_cast):
            found.setdefault((row.module, row.phase, row.part_of or _one_name(row.op)), set()).update(gives)
    return found


def _one_name(op: str) -> str:
    return next((name for pattern, name in _SAME if pattern.search(op)), op)


def as_record(rows: Iterable[OpRow]) -> dict[str, Any]:
    """A map as it is stored: its sums, and an object a row with the keys of `OpRow`."""
    rows = list(rows)
    found = totals(rows)
    return {
        "schema": SCHEMA_VERSION,
        "totals": {
            "flops_by_dtype": found.flops_in,
            "low_precision_share_of_flops": found.low_share,
            "calls_without_flop_formula": found.uncounted,
            "cast_calls": found.casts,
            "cast_bytes": found.cast_bytes,
            "bytes_read_and_written": found.all_bytes,
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }
