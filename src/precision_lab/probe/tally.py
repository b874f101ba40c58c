"""What casting to a narrow format would do to a tensor: counted on its device, from its values, without casting.

Knows the thresholds of a format under rounding to nearest even, and which loss scales suit a set of gradients. Refuses
to know models and steps. Values are taken as float32; counts are of elements; a loss scale is a power of two, by its
exponent.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

TOLERATED = 1e-3  # share of the nonzero gradients that a fitting loss scale may flush to zero
EXPONENTS = range(-24, 102)  # of the loss scales looked at


@dataclass(frozen=True)
class Format:
    """The magnitudes at which rounding to nearest even changes what a float32 number becomes."""

    largest: float  # the largest finite number
    overflow: float  # from here on infinity
    zero: float  # up to here zero
    normal: float  # from here on a normal number; between the two a subnormal one

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Format":
        """Each threshold is the midpoint of two neighbours; a tie goes to the even one. Exact in float32."""
        info = torch.finfo(dtype)
        power = info.max / (2 - info.eps)  # the largest power of two
        half_step = info.tiny * info.eps / 2  # of the subnormal numbers
        return cls(info.max, power * (2 - info.eps / 2), half_step, info.tiny - half_step)


FORMATS = {"float16": Format.of(torch.float16), "bfloat16": Format.of(torch.bfloat16)}
_NARROWEST = FORMATS["float16"]
_ZERO_EXPONENT = round(math.log2(_NARROWEST.zero))
_BIAS = 127  # of float32's exponent


@dataclass
class Range:
    """What was counted in one quantity. Shares are of the finite values that are not zero."""

    values: int = 0
    nonfinite: int = 0
    nonzero: int = 0  # and finite
    largest: float = 0.0  # magnitude of a finite one: amax
    overflow: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))  # by format
    flushed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    subnormal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    by_power: list[int] = field(default_factory=list)  # [b]: nonzero ones of at most 2**(b - 127), and more than half

    def headroom(self, name: str) -> float:
        """The largest magnitude as a share of the format's largest finite number: 1 and more overflows."""
        return self.largest / FORMATS[name].largest

    def flushed_at(self, exponent: int) -> int:
        """How many float16 flushes to zero under a loss scale of 2**exponent. For gradients alone."""
        return sum(self.by_power[1 : max(1, _ZERO_EXPONENT - exponent + _BIAS + 1)])

    def stored(self) -> dict[str, Any]:
        """Plain values for a file."""
        shares = {
            name: {
                "headroom": short(self.headroom(name)),
                "overflow": short(share(self.overflow[name], self.nonzero)),
                "flushed": short(share(self.flushed[name], self.nonzero)),
                "subnormal": short(share(self.subnormal[name], self.nonzero)),
            }
            for name in FORMATS
        }
        counts = {"values": self.values, "nonfinite": self.nonfinite, "nonzero": self.nonzero}
        return counts | {"amax": short(self.largest)} | shares


def share(part: int, whole: int) -> float:
    """0 of nothing."""
    return part / whole if whole else 0.0


def short(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


Key = tuple[str, str]  # (module, quantity)


class Tallies:
    """Counts of many tensors, kept on their device until they are read together."""

    def __init__(self) -> None:
        self._counted: dict[Key, tuple[Tensor, Tensor, Tensor | None]] = {}

    def add(self, module: str, quantity: str, tensor: Tensor, by_power: bool = False) -> None:
        """Count a floating-point tensor among the others of its key; `by_power` for gradients."""
        with torch.no_grad():
            found = _counted(tensor, by_power)
            if before := self._counted.get((module, quantity)):
                found = (
                    before[0] + found[0],
                    torch.maximum(before[1], found[1]),
                    before[2] + found[2] if by_power else None,
                )
            self._counted[module, quantity] = found

    def read(self) -> dict[Key, Range]:
        """All that was counted; waits for the device."""
        found = {}
        for key, (counts, largest, by_power) in self._counted.items():
            values, nonfinite, nonzero, *rest = counts.tolist()
            kinds = [dict(zip(FORMATS, rest[at::3], strict=True)) for at in range(3)]
            found[key] = Range(values, nonfinite, nonzero, float(largest), *kinds)
            found[key].by_power = [] if by_power is None else by_power.tolist()
        return found


def _counted(tensor: Tensor, by_power: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(counts in the order of Range's fields, the largest finite magnitude, nonzero values by power of two)."""
    values = tensor.detach()
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    magnitude = values.float().abs().flatten()
    finite = (magnitude < math.inf).count_nonzero()
    magnitude.nan_to_num_(0.0, 0.0, 0.0)
    nonzero = magnitude.count_nonzero()
    counts = [torch.full_like(finite, magnitude.numel()), magnitude.numel() - finite, nonzero]
    zeros = magnitude.numel() - nonzero
    for form in FORMATS.values():
        up_to_zero = (magnitude <= form.zero).count_nonzero()
        below_normal = (magnitude < form.normal).count_nonzero()
        overflow = (magnitude >= form.overflow).count_nonzero()
        counts += [overflow, up_to_zero - zeros, below_normal - up_to_zero]
    largest = magnitude.max() if magnitude.numel() else magnitude.sum()
    # the exponent's bits, rounded up: b where 2**(b - 128) < magnitude <= 2**(b - 127)
    powers = ((magnitude.view(torch.int32) + 0x7FFFFF) >> 23).bincount(minlength=256) if by_power else None
    return torch.stack(counts), largest, powers


@dataclass(frozen=True)
class ScaleWindow:
    """The loss scales that suit gradients in float16, 2**lowest to 2**highest, and the gradient that ends them."""

    lowest: int | None  # None: at no scale looked at is too much flushed to zero
    highest: int
    below: Key | None  # most of what the next lower scale flushes
    above: Key  # what the next higher scale makes overflow

    def holds(self, at_least: float = 0.0) -> bool:
        """Whether there is such a scale, and one of `at_least`."""
        return self.highest >= (self.lowest if self.lowest is not None else -math.inf) and 2.0**self.highest >= at_least

    def stored(self) -> dict[str, Any]:
        """Plain values for a file."""
        return {
            "lowest": None if self.lowest is None else 2.0**self.lowest,
            "highest": 2.0**self.highest,
            "limited_below_by": list(self.below) if self.below else None,
            "limited_above_by": list(self.above),
            "avoids_both": self.holds(),
        }


def scale_window(gradients: Mapping[Key, Range]) -> ScaleWindow | None:
    """The loss scales at which none of the gradients overflows in float16 and few are flushed to zero.

    Few: less than TOLERATED of the nonzero ones of each quantity, all modules together. None without a nonzero
    gradient.
    """
    above, widest = max(gradients.items(), key=lambda item: item[1].largest, default=(None, Range()))
    if not widest.largest:
        return None
    highest = math.floor(math.log2(_NARROWEST.overflow / widest.largest))
    while widest.largest * 2.0**highest >= _NARROWEST.overflow:  # the logarithm may round
        highest -= 1
    totals = {kind: total(one for (_, other), one in gradients.items() if other == kind) for _, kind in gradients}
    fitting = (exponent for exponent in EXPONENTS if not _too_much_flushed(totals, exponent))
    lowest = next(fitting, EXPONENTS.stop)
    if lowest == EXPONENTS.start:
        return ScaleWindow(None, highest, None, above)
    at_fault = [key for key in gradients if key[1] in _too_much_flushed(totals, lowest - 1)]
    below = max(at_fault, key=lambda key: gradients[key].flushed_at(lowest - 1))
    return ScaleWindow(lowest, highest, below, above)


def _too_much_flushed(totals: Mapping[str, Range], exponent: int) -> set[str]:
    """The quantities of which a loss scale of 2**exponent flushes too much."""
    return {kind for kind, one in totals.items() if share(one.flushed_at(exponent), one.nonzero) >= TOLERATED}


def total(ranges: Iterable[Range]) -> Range:
    """The counts of all of them together."""
    whole = Range()
    for one in ranges:
        whole.values += one.values
        whole.nonfinite += one.nonfinite
        whole.nonzero += one.nonzero
        whole.largest = max(whole.largest, one.largest)
        for name in FORMATS:
            whole.overflow[name] += one.overflow[name]
            whole.flushed[name] += one.flushed[name]
            whole.subnormal[name] += one.subnormal[name]
        whole.by_power = [a + b for a, b in zip_longest(whole.by_power, one.by_power, fillvalue=0)]
    return whole
