"""Which dtype autocast really picks, operation by operation, forward and backward.

Knows: every operation below autocast of one forward, loss and backward, with its module, its phase, the dtypes that
went in and came out, its FLOPs and bytes, the casts included. Refuses to know: values, time, whose autocast kernels
are installed, and what a compiled or scripted model would run (pass the eager one).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from precision_lab.nested import tensors_in
from precision_lab.probe.op_rows import OpRow
from precision_lab.probe.scopes import ModuleScopes, in_backward
from precision_lab.probe.trace import leaves_no_trace

_ATEN = torch.ops.aten
# Allocation and a view that its schema does not call one (`is_view` tells the others): no number
# is computed here.
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COMPUTE_NOTHING = ALLOCATIONS | {"_unsafe_view"}
_COPIES = frozenset({"_to_copy", "copy_"})
# Functions that are one kernel on one device and several on another.
_FUNCTIONS = {"scaled_dot_product_attention": "attention", "dropout": "dropout"}
# torch has formulas for the attention kernels of CUDA; that of the CPU takes and gives the same.
_FLOPS = flop_registry | {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


def op_map(model: nn.Module, forward: Callable[[], Tensor], fused: bool = False) -> list[OpRow]:
    """Run `forward` and the backward of its loss once; return its operations by first occurrence.

    `forward` takes nothing, opens and closes the arm's autocast itself and returns the scalar loss. Views, allocations
    and operations without a floating-point tensor are left out. Parameters, gradients, buffers, random number
    generators and training mode of `model` are afterwards as before. `fused` is as for `OpRecorder.rows`. Raises
    ValueError if the loss is not a scalar; whatever the step raises has a note that says at which operation.
    """
    recorder = OpRecorder(model)
    with leaves_no_trace(model), torch.enable_grad(), recorder.naming():
        with recorder:
            loss = forward()
        if loss.numel() != 1:
            raise ValueError(f"forward() must return a scalar loss, not shape {tuple(loss.shape)}")
        grad = torch.ones_like(loss)  # made out here, or it would count as an operation of the loss
        with recorder:
            loss.backward(grad)
    return recorder.rows(fused)


class OpRecorder(TorchDispatchMode):
    """Within: takes down operations below autocast and autograd, where casts and true dtypes are visible."""

    supports_higher_order_operators = True  # flex_attention and the like pass through, counted

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._scopes = ModuleScopes(model)
        self._recurrent = {name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}
        self._sums: dict[tuple, list[Any]] = {}  # calls, FLOPs, bytes
        self._given: dict[tuple[str, str], _Given] = {}  # by module and function

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Around all of it: operations are known by module, and as part of attention or dropout.

        The latter by other functions in torch's module, which are put back: a TorchFunctionMode does not see the
        attention within `multi_head_attention_forward` (2.14.1).
        """
        own = {name: getattr(nn.functional, name) for name in _FUNCTIONS}
        try:
            for name, function in own.items():
                setattr(nn.functional, name, self._named(function, _FUNCTIONS[name]))
            with self._scopes.tracked():
                yield
        finally:
            for name, function in own.items():
                setattr(nn.functional, name, function)

    def _named(self, function: Callable, name: str) -> Callable:
        @wraps(function, updated=())
        def named(*args: Any, **kwargs: Any) -> Any:
            module = self._scopes.current()
            with self._scopes.inside(name):
                result = function(*args, **kwargs)
            given = self._given.setdefault((module, name), _Given())
            given.calls += 1
            given.dtypes = tuple(dict.fromkeys((*given.dtypes, *_dtypes(tensors_in(result)))))
            given.nbytes += sum(map(_nbytes, tensors_in((args, kwargs, result))))
            return result

        return named

    def rows(self, fused: bool = False) -> list[OpRow]:
        """What was taken down, by first occurrence.

        With `fused`, attention is one operation in the dtype that it gives, forward and backward, as it is on CUDA and
        MPS; the CPU's kernel has another name, and where there is dropout it takes several, in float32.
        """
        sums = dict(self._sums)
        for (module, name), given in self._given.items() if fused else ():
            if name == "attention":
                sums = _as_one(sums, module, given)
        return [
            OpRow(*key[:5], calls, key[5], flops, nbytes, key[6], self._given.get((key[0], key[6]), _Given()).dtypes)
            for key, (calls, flops, nbytes) in sums.items()
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = operation(func)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "__notes__", ()):
                error.add_note(f"{op} in {self._scopes.current().partition('()')[0] or 'the model itself'}")
            raise
        if not getattr(func, "is_view", False) and op not in _COMPUTE_NOTHING:
            self._take(func, op, args, kwargs, result)
        return result

    def _take(self, func: Any, op: str, args: tuple, kwargs: dict, result: Any) -> None:
        read, written = tensors_in((args, kwargs)), tensors_in(result)
        inputs, outputs = _dtypes(read), _dtypes(written)
        if not inputs and not outputs:
            return
        # copy_ writes into its first input: a cast if the source differs from that.
        is_cast = op in _COPIES and bool(inputs) and len({*inputs, *outputs}) > 1
        phase = "backward" if in_backward() else "forward"
        module, _, function = self._scopes.current().partition("()")
        part_of = function or ("rnn" if module in self._recurrent else "")
        formula = _FLOPS.get(getattr(func, "overloadpacket", func))
        flops = None if formula is None else int(formula(*args, **kwargs, out_val=result))
        nbytes = sum(map(_nbytes, (*(read[1:] if op == "copy_" else read), *written)))
        key = (module, phase, op, inputs, outputs, is_cast, part_of)
        calls, flops_before, nbytes_before = self._sums.get(key, (0, None, 0))
        flops = flops_before if flops is None else flops + (flops_before or 0)
        self._sums[key] = [calls + 1, flops, nbytes + nbytes_before]


@dataclass
class _Given:
    """The calls of a function in one module: what they gave, and the bytes of what they took and gave."""

    calls: int = 0
    dtypes: tuple[str, ...] = ()
    nbytes: int = 0


def _as_one(sums: dict[tuple, list[Any]], module: str, given: _Given) -> dict[tuple, list[Any]]:
    """With all that a module's attention does in a phase as one operation. Its backward moves twice the bytes."""
    made: dict[tuple, list[Any]] = {}
    for key, (calls, flops, nbytes) in sums.items():
        phase, op, is_part = key[1], "scaled_dot_product_attention", key[0] == module and key[6] == "attention"
        if is_part:
            op, times = (op, 1) if phase == "forward" else (f"{op}_backward", 2)
            key = (module, phase, op, given.dtypes, given.dtypes, False, "attention")
            calls, nbytes = given.calls, given.nbytes * times
            flops = (flops or 0) + made.get(key, (0, 0, 0))[1]
        made[key] = [calls, flops, nbytes]
    return made


def operation(func: torch._ops.OpOverload) -> str:
    """Its name in aten, without the overload."""
    return func.name().removeprefix("aten::").split(".")[0]


def _dtypes(tensors: list[Tensor]) -> tuple[str, ...]:
    floating = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in floating))


def _nbytes(tensor: Tensor) -> int:
    """Of its elements; of an expanded tensor those that are there."""
    whole = tensor.numel() * tensor.element_size()
    return min(whole, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else whole
