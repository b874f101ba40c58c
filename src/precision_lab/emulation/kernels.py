"""Autocast kernels put in place of torch's own: those of another device, or float32 for named operations.

Knows: torch's dispatcher and the casts of `lists.Cast`, as `ATen/autocast_mode.h` states them. Refuses to know rounding
and modules. A TorchFunctionMode cannot do this: it does not see what C++ composites call, such as multi-head attention.
Replaced kernels hold for the whole process until they are removed, so there is one set at a time.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from precision_lab.emulation.guards import redirect
from precision_lab.emulation.lists import Cast, policy_of

# On CUDA nn.LSTM and its kin are one operation of cuDNN's, which is lowered. On a CPU they are composites, and a torch
# without CUDA does not have that operation.
_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")


class AutocastKernels:
    """While installed: autocast on `device_type` follows `casts` (operation with overload -> what is done to it).

    With a `target`, the device that is emulated, whatever else torch treats there is left as it comes in, and what
    a model says of the target's autocast holds for `device_type`; without one all else is as torch has it. `called`
    gathers the operations treated, and `current` is the one that is being computed, None outside of any.
    """

    def __init__(self, device_type: str, casts: dict[str, Cast], target: str | None = None):
        self.device_type, self.target = device_type, target
        self.called: set[str] = set()
        self.current: str | None = None
        self.failed: str | None = None  # the first operation that raised
        self.memory = CastMemory(device_type)
        self._off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))
        self._casts = casts
        self._library: Any = None
        self._end_redirection: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Replace the kernels. RuntimeError where another set is installed."""
        global _installed
        if _installed is not None:
            raise RuntimeError("a set of autocast kernels is installed already")
        kernels = {name: self._kernel(name, cast) for name, cast in self._casts.items()}
        for name in policy_of(self.device_type) if self.target else ():
            kernels.setdefault(name, torch.library.fallthrough_kernel)
        _installed, self._library = self, torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*[Oo]verrid.*previously registered kernel")  # torch before 2.14
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, f"Autocast{self.device_type.upper()}", allow_override=True)
        if self.target not in (None, self.device_type):
            self._end_redirection = redirect(self.target, self.device_type)

    def remove(self) -> None:
        """Put torch's own kernels back."""
        global _installed
        self._end_redirection()
        self._library._destroy()
        self._library, _installed = None, None

    def _kernel(self, name: str, cast: Cast) -> Callable:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        treat = _TREATMENTS[cast]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self.called.add(base)
            outer, self.current = self.current, self.current or base
            try:
                with torch._C._ExcludeDispatchKeyGuard(self._off):
                    return treat(op, self.memory, args, kwargs)
            except Exception:
                self.failed = self.failed or base
                raise
            finally:
                self.current = outer

        return kernel


_installed: AutocastKernels | None = None


@contextmanager
def installed(kernels: AutocastKernels) -> Iterator[None]:
    """Within: these kernels. Torch's own are back afterwards."""
    kernels.install()
    try:
        yield
    finally:
        kernels.remove()


def emulated(target: str, fp32_ops: list[str]) -> dict[str, Cast]:
    """The casts of `target` for CPU tensors, with these operations in float32."""
    casts = policy_of(target)
    if target == "cuda":
        casts |= dict.fromkeys(_RECURRENT, Cast.lower)
    return casts | in_float32(fp32_ops)


def in_float32(names: list[str]) -> dict[str, Cast]:
    """Every overload of these operations but those that write into their inputs -> float32."""
    casts = {}
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if not getattr(packet, overload)._schema.is_mutable:
                casts[name if overload == "default" else f"{name}.{overload}"] = Cast.fp32
    return casts


class CastMemory:
    """Casts of weights, kept for as long as one autocast region lasts, so that a weight used twice is cast once.

    As torch does it: float32 leaves that require a gradient and are no views. Their gradients then add up in low
    precision, which is part of what is emulated.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # the weight is held, so that its id is its own

    def clear(self) -> None:
        self._casts.clear()

    def eligible(self, value: Any) -> bool:
        """Whether autocast casts this at all."""
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == self.device_type
        )

    def low(self) -> torch.dtype:
        return torch.get_autocast_dtype(self.device_type)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor in `dtype`, if it is one that autocast casts; anything else as it is."""
        if not self.eligible(value) or value.dtype is dtype:
            return value
        kept = dtype is self.low() and value.dtype is torch.float32 and value.requires_grad and value.is_leaf
        if not (kept and not value._is_view() and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self._casts:
            with torch.enable_grad():  # the first use may be under no_grad, and a later one need the gradient
                self._casts[id(value)] = (value, value.to(dtype))
        return self._casts[id(value)][1]


def _lower(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda value: memory.cast(value, memory.low()), (args, kwargs))
    return op(*args, **kwargs)


def _fp32(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda value: memory.cast(value, torch.float32), (args, kwargs))
    return op(*args, **kwargs)


def _fp32_result(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    if not memory.eligible(args[0]):
        return op(*args, **kwargs)
    place = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    if place < len(args):
        args = tuple(torch.float32 if i == place and value is None else value for i, value in enumerate(args))
    elif kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _fp32_norm(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    if not memory.eligible(args[0]):
        return op(*args, **kwargs)
    p, dim, keepdim = (*args[1:], *(2, [], False)[len(args) - 1 :])
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(args[0], p, dim, keepdim, dtype=torch.float32)


def _widest(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    wide = any(memory.eligible(v) and v.dtype is torch.float32 for v in tree_leaves((args, kwargs)))
    dtype = torch.float32 if wide else memory.low()
    args, kwargs = tree_map(lambda value: memory.cast(value, dtype), (args, kwargs))
    return op(*args, **kwargs)


def _refused(op: Any, memory: CastMemory, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{op._schema.name.removeprefix('aten::')} is not allowed under autocast: its input is a probability, which "
        "low precision rounds to 0 or 1. Use binary_cross_entropy_with_logits on the logits."
    )


_TREATMENTS = {
    Cast.lower: _lower,
    Cast.fp32: _fp32,
    Cast.fp32_result: _fp32_result,
    Cast.fp32_norm: _fp32_norm,
    Cast.widest: _widest,
    Cast.refused: _refused,
}
