"""Which dtype autocast really picks, operation by operation, forward and backward.

Knows: every operation below autocast of one forward, loss and backward, with its module, its
phase and the dtypes that went in and came out, the casts included. Refuses to know: values,
time, and what a compiled or scripted model would run (pass the eager one).
Counts are calls in one pass.
"""

import dataclasses
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precision_lab.probe.scopes import ModuleScopes, in_backward
from precision_lab.probe.trace import leaves_no_trace

# Allocation and a view that its schema does not call one (`is_view` tells the others): no number
# is computed here.
_COMPUTE_NOTHING = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COPIES = frozenset({"_to_copy", "copy_"})
_MATMUL_LIKE = re.compile(r"mm$|^(mv|addmv|dot|linear)(_backward)?$|conv(?!ert)|attention|rnn|lstm_mps")


@dataclass(frozen=True)
class OpRow:
    """One operation as one module runs it in one phase with one set of dtypes.

    `module` is the name in `model.named_modules()`, "" for the model itself and for what runs
    outside any module, such as the loss. `phase` is "forward" or "backward"; a forward that
    activation checkpointing repeats counts as backward. `op` is the aten name without overload.
    `inputs` and `outputs` are the distinct dtypes of the floating-point (or complex) tensors in
    order of appearance. `is_cast` marks a copy whose only purpose is another floating dtype.
    """

    module: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    count: int
    is_cast: bool


def op_map(model: nn.Module, forward: Callable[[], Tensor]) -> list[OpRow]:
    """Run `forward` and the backward of its loss once; return its operations by first occurrence.

    `forward` takes nothing, opens and closes the arm's autocast itself and returns the scalar
    loss. Views, allocations and operations without a floating-point tensor are left out.
    Parameters, gradients, buffers, random number generators and training mode of `model` are
    afterwards as before. Raises ValueError if the loss is not a scalar.
    """
    scopes = ModuleScopes(model)
    recorder = _OpRecorder(scopes)
    with leaves_no_trace(model), torch.enable_grad(), scopes.tracked():
        with recorder:
            loss = forward()
        if loss.numel() != 1:
            raise ValueError(f"forward() must return a scalar loss, not shape {tuple(loss.shape)}")
        grad = torch.ones_like(loss)  # made out here, or it would count as an operation of the loss
        with recorder:
            loss.backward(grad)
    return [
        OpRow(module, phase, op, inputs, outputs, count, is_cast)
        for (module, phase, op, inputs, outputs, is_cast), count in recorder.counts.items()
    ]


def by_operation(rows: Iterable[OpRow]) -> list[OpRow]:
    """Add up rows that differ in nothing but the module; `module` becomes ""."""
    counts: Counter[OpRow] = Counter()
    for row in rows:
        counts[dataclasses.replace(row, module="", count=0)] += row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def to_json(rows: Iterable[OpRow]) -> str:
    """A JSON list with one object a row, keys as in `OpRow`."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n"


def render(rows: Iterable[OpRow], *, by_module: bool, width: int) -> str:
    """Plain text of at most `width` columns: operations, casts, and the share of each dtype.

    With `by_module` each block of rows is headed by its module ("" prints as "(model)"), else
    modules are added up. The last line is about matmul, convolution, attention and RNN calls,
    forward and backward: the ones that low precision is meant to speed up.
    """
    rows = list(rows) if by_module else by_operation(rows)
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    for title, column, part in (
        ("operations", "op", [row for row in rows if not row.is_cast]),
        ("casts", "cast", [row for row in rows if row.is_cast]),
    ):
        console.print(_table(column, part, by_module) if part else f"no {title}")
        console.print()
    console.print(_matmul_share(rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _table(column: str, rows: list[OpRow], by_module: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    if by_module:
        table.add_column("module", overflow="fold")
    table.add_column("phase", no_wrap=True)
    table.add_column(column, overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("inputs -> outputs", overflow="fold")
    above = None
    for row in rows:
        heading = (row.module or "(model)") if row.module != above else ""
        above = row.module
        dtypes = f"{', '.join(row.inputs) or '-'} -> {', '.join(row.outputs) or '-'}"
        cells = [row.phase, row.op, str(row.count), dtypes]
        table.add_row(*([heading, *cells] if by_module else cells))
    return table


def _matmul_share(rows: Iterable[OpRow]) -> str:
    calls: Counter[str] = Counter()
    for row in rows:
        if _MATMUL_LIKE.search(row.op):
            calls[" and ".join(row.inputs)] += row.count
    total = sum(calls.values())
    if not total:
        return "No matmul, convolution, attention or RNN calls."
    shares = (f"{n} of {total} ({n / total:.1%}) in {dtype}" for dtype, n in calls.most_common())
    return "Matmul, convolution, attention and RNN calls: " + ", ".join(shares)


class _OpRecorder(TorchDispatchMode):
    """Counts operations below autocast and autograd, where casts and true dtypes are visible."""

    supports_higher_order_operators = True  # flex_attention and the like pass through, counted

    def __init__(self, scopes: ModuleScopes) -> None:
        super().__init__()
        self._scopes = scopes
        self.counts: Counter[tuple] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = func.name().removeprefix("aten::").split(".")[0]
        if getattr(func, "is_view", False) or op in _COMPUTE_NOTHING:
            return result
        inputs, outputs = _dtypes((args, kwargs)), _dtypes(result)
        if inputs or outputs:
            # copy_ writes into its first input: a cast if the source differs from that.
            is_cast = op in _COPIES and bool(inputs) and len({*inputs, *outputs}) > 1
            phase = "backward" if in_backward() else "forward"
            self.counts[self._scopes.current(), phase, op, inputs, outputs, is_cast] += 1
        return result


def _dtypes(tree: object) -> tuple[str, ...]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    floating = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in floating))
