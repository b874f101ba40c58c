"""The error that each operation makes by itself, on inputs that float32 computed: no operation is blamed for what one
before it did.

Runs the arm's step once. Beside each low-precision tensor it keeps what float32 arithmetic has in its place. From that
an operation is computed twice: in float32, and from the same values rounded to the dtypes that the arm stores, in the
arm's arithmetic. The difference is its own, with what it makes of the rounding of its inputs. Knows operations, their
modules and both values; refuses to judge.
Errors are ratios of squared norms, |exact - local|^2 / |exact|^2, counts are of values. A gradient that is summed up is
held against its addends, where these are larger: that of a bias before a batch norm is 0, but for roundings.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from precision_lab.emulation.kernels import AutocastKernels
from precision_lab.emulation.rounding import LOW, compute
from precision_lab.nested import tensors_in
from precision_lab.probe.ops import ALLOCATIONS, operation
from precision_lab.probe.scopes import ModuleScopes, in_backward

_SWEEP_EVERY = 64  # operations after which values are let go whose tensors are gone
_NO_VALUES = ALLOCATIONS | {"detach", "lift_fresh"}


@dataclass
class LocalError:
    """Of all calls of an operation in a module, in one phase: what they lose."""

    module: str
    op: str  # as autocast sees it, such as softmax or linear; in backward that of the forward it belongs to
    phase: str  # forward | backward
    error: float = 0.0  # of the worst call
    total: float = 0.0  # of all calls: independent errors add up
    nonfinite: int = 0  # values that are finite in float32
    flushed: int = 0  # values that are zero and not so in float32
    amax: float = 0.0  # of float32's result
    lost_at: int = 0  # the number, in the whole step, of the operation that first lost values


class LocalErrors(TorchDispatchMode):
    """To be entered around a forward and backward under the arm's autocast; `rows` and `failed` are what it found.

    `functions`, entered within, tells the name of what raises before it becomes an operation.
    """

    def __init__(self, scopes: ModuleScopes, kernels: AutocastKernels, emulates: bool):
        super().__init__()
        self.failed: tuple[str, str] | None = None  # the module and operation that raised; "": none, but Python code
        self.functions = _Functions()
        self._scopes, self._kernels, self._emulates = scopes, kernels, emulates
        self._exact: dict[tuple, tuple[StorageWeakRef, Tensor]] = {}
        self._sums: dict[tuple[str, str, str], list[Tensor]] = {}
        self._calls = 0
        self._made: list[tuple[int, str]] = []  # autograd's counter at each operation of the forward, and its name

    def rows(self) -> list[LocalError]:
        """By first occurrence. Waits for the device."""
        found = []
        for (module, op, phase), sums in self._sums.items():
            error, nonfinite, flushed, amax, call = torch.stack(sums).double().cpu().unbind(1)
            row = LocalError(module, op, phase, error=float(error.max()), total=float(error.sum()))
            row.nonfinite, row.flushed, row.amax = int(nonfinite.sum()), int(flushed.sum()), float(amax.max())
            row.lost_at = int(call[(nonfinite > 0).double().argmax()])
            found.append(row)
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return self._run(func, args, kwargs)
        except Exception:
            self.failed = self.failed or (self._scopes.current(), self._op(func))
            raise

    def raised(self) -> None:
        """The step raised: find out where, if no operation below autocast did."""
        self.failed = self.failed or (self._scopes.raised_in or "", self._kernels.failed or self.functions.failed)

    def let_go(self) -> None:
        """Drop what was kept beside the step, when it is over."""
        self._exact.clear()

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch._C._current_autograd_node() is None:
            self._made.append((torch.autograd._get_sequence_nr(), self._op(func)))
        self._calls += 1
        if self._calls % _SWEEP_EVERY == 0:
            self._exact = {key: pair for key, pair in self._exact.items() if not pair[0].expired()}
        name = operation(func)
        known = any(self._key(t) in self._exact for t in tensors_in((args, kwargs)))
        if getattr(func, "is_view", False) or name in _NO_VALUES:
            return self._view(func, args, kwargs, known)
        if not known and not self._makes_low(args, kwargs):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # drawn once: two draws would be two dropouts
            result = func(*args, **kwargs)
            for t in tensors_in(result):
                self._keep(t, t.float() if t.dtype in LOW else t.clone())
            return result
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        exact = func(*_exactly(self._values, args), **_exactly(self._values, kwargs))
        local = self._local(func, args, kwargs)
        self._compare(func, args, exact, local)
        return local

    def _local(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, self._stored, (args, kwargs))
        return compute(func, args, kwargs) if self._emulates else func(*args, **kwargs)

    def _view(self, func: Any, args: tuple, kwargs: dict[str, Any], known: bool) -> Any:
        result = func(*args, **kwargs)
        if known:
            exact = func(*_exactly(self._values, args), **_exactly(self._values, kwargs))
            for t, value in zip(tensors_in(result), tensors_in(exact), strict=True):
                self._keep(t, value)
        return result

    def _in_place(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = list(tensors_in(written))
        for t in written:
            if self._key(t) not in self._exact:
                self._keep(t, t.detach().float() if t.dtype in LOW else t.detach().clone())
            t.copy_(self._values(t))  # what float32 has there, as far as it can be stored
        own = {id(t): t for t in written}
        others = {id(t): self._stored(t) for t in tensors_in((args, kwargs)) if id(t) not in own}
        func(*_exactly(self._values, args), **_exactly(self._values, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda t: (own | others)[id(t)], (args, kwargs))
        result = func(*args, **kwargs)
        for t in written:
            value = self._exact[self._key(t)][1]
            self._note(func, value, t)
        return result

    def _compare(self, func: Any, args: tuple, exact: Any, local: Any) -> None:
        for value, t in zip(tensors_in(exact), tensors_in(local), strict=True):
            # where a shape depends on values, those of the arm are gone on with
            if value.shape != t.shape and t.dtype is not torch.uint8:
                continue
            self._keep(t, value)
            self._note(func, value, t, self._summed(func, args, value))

    def _summed(self, func: Any, args: tuple, exact: Tensor) -> Tensor | None:
        """What a backward adds up to a smaller gradient, such as that of a bias: where it cancels, nothing is lost."""
        name = operation(func)
        if not in_backward() or not (name == "sum" or (name.endswith("backward") and exact.dim() == 1)):
            return None
        given = next((t for t in args if isinstance(t, Tensor) and t.is_floating_point()), None)
        return self._values(given) if given is not None and given.numel() > exact.numel() else None

    def _note(self, func: Any, exact: Tensor, local: Tensor, summed: Tensor | None = None) -> None:
        if not local.is_floating_point() or not local.numel():
            return
        wide = local.float() if local.dtype in LOW else local
        difference = exact - wide
        finite = difference.isfinite()
        power = _power(exact)
        if summed is not None:  # a sum of so many numbers of either sign
            power = torch.maximum(power, _power(summed))
        error = (torch.where(finite, difference, 0).square().sum() / power.clamp_min(1e-38)).nan_to_num()
        lost = (exact.isfinite() & ~wide.isfinite()).sum()
        flushed = ((wide == 0) & (exact != 0)).sum()
        amax = torch.where(exact.isfinite(), exact, 0).abs().max()
        call = torch.tensor(float(self._calls), device=local.device)
        phase = "backward" if in_backward() else "forward"
        key = (self._scopes.current(), self._op(func), phase)
        self._sums.setdefault(key, []).append(torch.stack([t.float() for t in (error, lost, flushed, amax, call)]))

    def _op(self, func: Any) -> str:
        """In a backward, the forward operation whose node is running: the first that found the counter beyond it."""
        own = operation(func)
        node = torch._C._current_autograd_node()
        if node is None:
            return self._kernels.current or own
        place = bisect_right(self._made, node._sequence_nr(), key=lambda made: made[0])
        return self._made[place][1] if place < len(self._made) else own

    def _makes_low(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        return kwargs.get("dtype") in LOW or any(t.dtype in LOW for t in tensors_in((args, kwargs)))

    def _values(self, t: Tensor) -> Tensor:
        """What float32 has in the place of `t`."""
        found = self._exact.get(self._key(t))
        if found is not None:
            return found[1]
        return t.float() if t.dtype in LOW else t

    def _stored(self, t: Tensor) -> Tensor:
        """What float32 has there, as the arm stores it."""
        # bytes are a kernel's own notes, laid out for the dtype that it computed in
        return t if t.dtype is torch.uint8 else self._values(t).to(t.dtype)

    def _keep(self, t: Tensor, exact: Tensor) -> None:
        if t.layout is torch.strided:
            self._exact[self._key(t)] = (StorageWeakRef(t.untyped_storage()), exact)

    def _key(self, t: Tensor) -> tuple | None:
        """An identity that a tensor saved for backward still has when it comes back as another object."""
        if t.layout is not torch.strided:
            return None
        return (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)


class _Functions(TorchFunctionMode):
    """The first torch function that raised, as the user's code calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            name = getattr(func, "__name__", "")
            self.failed = self.failed or ("" if name == "backward" else name)
            raise


def _power(exact: Tensor) -> Tensor:
    return torch.where(exact.isfinite(), exact, 0).square().sum()


def _exactly(values: Any, nested: Any) -> Any:
    nested = tree_map_only(Tensor, values, nested)
    return tree_map_only(torch.dtype, lambda dtype: torch.float32 if dtype in LOW else dtype, nested)
