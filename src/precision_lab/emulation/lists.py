"""What autocast does to which operation on a device, as the running torch has it.

Knows: the dispatcher's table of Autocast kernels, which says which operations are treated on each device, and torch's
own header `ATen/autocast_mode.h`, which says how CUDA treats them. Refuses to know any model or tensor.
The lists change from version to version: none is written down here but for what the header does not hold.
"""

import functools
import re
from enum import Enum
from pathlib import Path

import torch

from precision_lab.errors import InputError

TARGETS = ("cpu", "cuda", "mps")


class Cast(Enum):
    """How autocast treats an operation, in the words of torch's documentation."""

    lower = "lower precision"
    fp32 = "float32"
    fp32_result = "float32 by its dtype argument"  # only where none was given
    fp32_norm = "float32 by a dtype argument of another overload"
    widest = "widest input type"
    refused = "not allowed"


# Macros of the header, each a list of `_(name)` or `_(name, overload)`.
_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Cast.lower,
    "AT_FORALL_FP32": Cast.fp32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Cast.fp32_result,
    "AT_FORALL_PROMOTE": Cast.widest,
}
# What the header does not hold (autocast_mode.cpp has it). A name that is registered and stands nowhere is an error.
_BESIDE = {
    "cuda": {
        "_cudnn_rnn": Cast.lower,
        "cudnn_convolution": Cast.lower,
        "cudnn_convolution_transpose": Cast.lower,
        "linalg_matrix_sqrth": Cast.fp32,
        "norm.Scalar": Cast.fp32_norm,
        "norm.ScalarOpt_dim": Cast.fp32_norm,
        "norm.names_ScalarOpt_dim": Cast.fp32_norm,
        "binary_cross_entropy": Cast.refused,
    },
    "mps": {
        "_mps_convolution": Cast.lower,
        "batch_norm": Cast.fp32,
        "norm.Scalar": Cast.fp32_norm,
        "norm.ScalarOpt_dim": Cast.fp32_norm,
        "norm.names_ScalarOpt_dim": Cast.fp32_norm,
    },
}
# A CPU takes float32 for all that it treats, but for what the header lowers and these.
_CPU_LOWER = {"conv1d.padding", "conv2d.padding", "conv3d.padding", "_addmm_activation"}
_CPU_LOWER |= {"_native_multi_head_attention", "mkldnn_rnn_layer"}
_CPU_WIDEST = {"cat", "stack", "index_copy"}


def policy_of(target: str) -> dict[str, Cast]:
    """Operation, with its overload (`softmax.int`) -> what autocast does to it on `target`.

    InputError where this torch treats an operation that is not known here, or lacks the header.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{target.upper()}")
    names = sorted(name.removeprefix("aten::") for name in registered if name.startswith("aten::"))
    treated = {name: _cast_of(target, name) for name in names}
    if unknown := [name for name, cast in treated.items() if cast is None]:
        raise InputError(
            f"torch {torch.__version__} treats {unknown[0]} under autocast on {target} in a way that is not known "
            "here; it cannot be emulated with this version."
        )
    return treated


def _cast_of(target: str, name: str) -> Cast | None:
    stated = _header().get(name)
    if target != "cpu":
        return stated or _BESIDE[target].get(name)
    if stated is Cast.lower or name in _CPU_LOWER:
        return Cast.lower
    return Cast.widest if name in _CPU_WIDEST else Cast.fp32


@functools.cache
def _header() -> dict[str, Cast]:
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"This torch has no {path.name}, from which the autocast lists of other devices are read; the wheels of "
            "torch have it."
        ) from error
    found = {}
    for macro, cast in _MACROS.items():
        body = re.search(rf"#define {macro}\(_\)[^\n]*\\\n((?:[^\n]*\\\n)*[^\n]*\n)", text)
        entries = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body.group(1)) if body else []
        if not entries:
            raise InputError(f"torch {torch.__version__} states no {macro} in {path.name}; it cannot be emulated.")
        found |= {f"{name}.{overload}" if overload else name: cast for name, overload in entries}
    return found
