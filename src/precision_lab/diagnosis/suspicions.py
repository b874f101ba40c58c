"""Operations that are known to go wrong in low precision, seen as a step runs them.

Knows each operation's name, dtypes, constants and module. Refuses to know whether anything came of it.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precision_lab.diagnosis.causes import Cause
from precision_lab.emulation.rounding import LOW
from precision_lab.probe.ops import operation
from precision_lab.probe.scopes import ModuleScopes, in_backward

_KEEPS_FROM_ZERO = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "maximum"})
_FILLS = frozenset({"full", "full_like", "new_full", "scalar_tensor"})
_HANDS_ON = frozenset({"_to_copy", "view", "_unsafe_view", "clone", "squeeze", "unsqueeze", "reshape", "detach"})


class Suspicions(TorchDispatchMode):
    """To be entered around a forward and backward, above the arithmetic; `causes` are what it noticed in the forward.

    Waits for the device at each cast to low precision.
    """

    supports_higher_order_operators = True

    def __init__(self, scopes: ModuleScopes, dtype: torch.dtype):
        super().__init__()
        self._scopes, self._dtype = scopes, dtype
        self._found: dict[tuple[str, str], Cause] = {}
        self._sigmoids: dict[int, StorageWeakRef] = {}

    def causes(self) -> list[Cause]:
        """One of a kind for each module, in the order of the step."""
        return list(self._found.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        name = operation(func)
        self._before(name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "sigmoid" or (name in _HANDS_ON and self._is_sigmoid(args[0])):
            storage = result.untyped_storage()
            self._sigmoids[storage._cdata] = StorageWeakRef(storage)
        return result

    def _before(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        low = kwargs.get("dtype") if kwargs.get("dtype") in LOW else first.dtype if first is not None else None
        if name == "binary_cross_entropy" and self._is_sigmoid(first):
            self._note(probabilities(self._scopes.current()))
        if low not in LOW:
            return
        if name == "_to_copy":
            self._cast(first, low)
        elif first is not None or name in _FILLS:
            self._constants(name, low, args, kwargs)

    def _is_sigmoid(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return False
        known = self._sigmoids.get(value.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def _constants(self, name: str, dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]) -> None:
        limits = torch.finfo(dtype)
        smallest = limits.tiny * limits.eps  # the smallest subnormal
        short = str(dtype).removeprefix("torch.")
        for value in _constants_in(name, args, kwargs):
            size = abs(value)
            if limits.max < size < math.inf:
                says = f"{name} is given {value:g}, and {short} ends at {limits.max:g}."
                remedy = f"Use torch.finfo(x.dtype).min or -inf, or {_keep(self._scopes.current())}"
                self._note(Cause("constant_out_of_range", self._scopes.current(), says, remedy))
            elif 0 < size < limits.tiny and name in _KEEPS_FROM_ZERO:
                kept = "is 0 there" if size <= smallest / 2 else "is among its coarse, subnormal numbers"
                says = (
                    f"{name} is given {value:g} beside {short} values: it {kept} (smallest normal {limits.tiny:.2g})."
                )
                remedy = f"Use a larger epsilon, compute in float32 at this place, or {_keep(self._scopes.current())}"
                self._note(Cause("epsilon_too_small", self._scopes.current(), says, remedy))

    def _cast(self, value: Tensor, dtype: torch.dtype) -> None:
        """Whole numbers that a cast moves, such as positions and steps: bfloat16 holds all up to 256 alone."""
        if value.dtype in LOW or value.is_complex() or value.numel() < 2 or value.is_sparse:
            return
        wide = value.detach().double()
        moved = (wide != value.detach().to(dtype).double()) & wide.isfinite()
        if bool(moved.any()) and bool((wide == wide.round()).all()) and bool((wide != wide.flatten()[0]).any()):
            short, exact = str(dtype).removeprefix("torch."), int(2 / torch.finfo(dtype).eps)
            where = self._scopes.current()
            says = (
                f"Whole numbers up to {float(wide.abs().max()):g} are cast to {short}, which holds all of them up to "
                f"{exact} only: {int(moved.sum())} of {value.numel()} become others."
            )
            remedy = f"Compute with them elementwise in float32, outside autocast, or {_keep(where)}"
            self._note(Cause("integers_rounded", where, says, remedy))

    def _note(self, cause: Cause) -> None:
        self._found.setdefault((cause.code, cause.where), cause)


def probabilities(where: str) -> Cause:
    """Binary cross-entropy of what a sigmoid made."""
    return Cause(
        "sigmoid_then_bce",
        where,
        "A sigmoid is followed by binary_cross_entropy: in low precision a probability near 1 becomes 1, and its "
        "gradient is lost. Autocast refuses it on CUDA and lets it pass on a CPU.",
        "Hand the logits to binary_cross_entropy_with_logits.",
    )


def _keep(where: str) -> str:
    return f"keep it in float32: precision.fp32_modules=[{where}]." if where else "keep the operation in float32."


def _constants_in(name: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[float]:
    """Numbers among the arguments, and tensors without a dimension on the CPU, but for what scales another argument."""
    named = {key: value for key, value in kwargs.items() if key not in ("alpha", "beta", "device", "dtype")}
    for value in tree_leaves((args[1:] if args and isinstance(args[0], Tensor) else args, named)):
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and name in _FILLS):
            yield float(value)
        elif isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
            yield float(value.detach())
