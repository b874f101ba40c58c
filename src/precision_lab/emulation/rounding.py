"""The arithmetic of low-precision units, carried out in float32: inputs as they are stored, products and sums in
float32, one rounding of the result.

Tensor cores multiply float16 or bfloat16 and add up in float32 (NVIDIA's PTX ISA, `mma`). A CPU without such units
takes up to 200 times as long for a float16 matmul as for a float32 one; this takes little more than float32.
Operations other than matmuls, convolutions and attention run as they are: torch computes these in float32 as well,
and rounds. Refuses to know policies and modules. Another format needs a `round_to` of its own and nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Round = Callable[[Tensor, torch.dtype], Tensor]
LOW = (torch.float16, torch.bfloat16)

_ATEN = torch.ops.aten
_MATMULS = (_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.addbmm, _ATEN.mv, _ATEN.addmv, _ATEN.dot)
_CONVOLUTIONS = (_ATEN.convolution, _ATEN.convolution_backward)
# Attention in one kernel, forward and backward; the sums of the softmax are float32 in any case.
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_FLASH = frozenset({_ATTENTION, _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default})
HEAVY = _FLASH | {packet.default for packet in (*_MATMULS, *_CONVOLUTIONS)}


def round_to(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 result to the format that it is stored in."""
    return exact.to(dtype)


class WideArithmetic(TorchDispatchMode):
    """Within: matmuls, convolutions and attention on low-precision tensors compute in float32 and round once."""

    supports_higher_order_operators = True

    def __init__(self, rounded: Round = round_to):
        super().__init__()
        self._round = rounded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {}, self._round)


def compute(func: Any, args: tuple, kwargs: dict[str, Any], rounded: Round = round_to) -> Any:
    """One operation as low-precision units do it; operations without such inputs as they are."""
    low = next((one.dtype for one in args if isinstance(one, Tensor) and one.dtype in LOW), None)
    # Where dtypes do not meet, torch says so.
    mixed = func not in _FLASH and len({one.dtype for one in args if isinstance(one, Tensor)}) > 1
    if func not in HEAVY or low is None or mixed:
        return func(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in LOW else t, (args, kwargs))
    exact = func(*args, **kwargs)
    if isinstance(exact, Tensor):
        return rounded(exact, low)
    kept = exact[1:] if func is _ATTENTION else ()
    return (*(rounded(t, low) if t is not None else t for t in exact[: len(exact) - len(kept)]), *kept)
