"""Why an arm's peak of memory is what it is beside the reference arm's, from what both are made of. MiB = 2^20 bytes.

A reason is given for arms of a low precision beside one that is none, where both peaks are known by kind, and only
if these tell the same ratio as the peaks that the comparison shows.
"""

from precision_lab.report.compare import Comparison, Row
from precision_lab.sizes import MIB

# An arm's share of the reference arm's peak from which on it saves little, and nothing.
LITTLE, NOTHING = 0.9, 0.97
# Autocast leaves these in float32. Where they are this share of the peak, it can save a sixth of it at most.
KEPT = ("parameters", "gradients", "optimizer_state")
MOSTLY = 2 / 3
# Between the ratio of the peaks by kind and the one in the table.
AGREES = 0.05
NAMED = 4  # kinds of a sentence, the ones that changed most
_LOW = ("bfloat16", "float16")
_IN_PHASE = {"forward": "in the forward pass", "backward": "in the backward pass", "optimizer": "in the optimizer step"}
_PLURAL = ("parameters", "gradients", "saved_activations", "weight_casts", "temporaries")


def memory_reasons(comparison: Comparison) -> list[str]:
    """A sentence an arm: what its peak saves and where, or why it saves nothing."""
    base = comparison.reference
    if not base or not base.memory or base.dtype in _LOW:
        return []
    return [_reason(row, base) for row in comparison.others if row.dtype in _LOW and row.memory and _agree(row, base)]


def peak_mib(row: Row) -> float:
    """The peak whose kinds are known; the row has them."""
    return sum(row.memory["by_kind"].values()) / MIB


def _agree(row: Row, base: Row) -> bool:
    known = row.against.get("peak_ratio")
    return known is not None and abs(peak_mib(row) / peak_mib(base) / known.mean - 1) < AGREES


def _reason(row: Row, base: Row) -> str:
    here, there = peak_mib(row), peak_mib(base)
    changes = _changes(row, base)
    if here < LITTLE * there:
        why = ""
        if row.settings.get("param_dtype") in _LOW:
            why = f", since parameters, gradients and optimizer state are in {row.dtype} as well"
        told = _listed([change for change in changes.items() if abs(change[1]) >= 0.05 * (there - here)])
        return f"{row.arm} saves {mib(there - here)} of {base.arm}'s {mib(there)} MiB at the peak{why}: {told}."
    much = "no" if here >= NOTHING * there else "little"
    more = [change for change in changes.items() if change[1] >= 0.01 * there]
    return f"{row.arm} saves {much} memory here ({mib(here)} against {mib(there)} MiB){_why_not(row, base, more)}."


def _why_not(row: Row, base: Row, more: list[tuple[str, float]]) -> str:
    there, changes = peak_mib(base), _changes(row, base)
    kept = sum(base.memory["by_kind"].get(kind, 0) for kind in KEPT) / MIB
    added = f"; {_listed(more)}" if more else ""
    where = _IN_PHASE.get(base.memory["phase"], "in a phase of its own")
    share = f"{mib(kept)} of {base.arm}'s {mib(there)} MiB"
    if row.memory["phase"] == base.memory["phase"] == "optimizer":
        return (
            ", because the peak sits in the optimizer step, where autocast changes nothing: parameters, gradients and "
            f"optimizer state take {share}"
        )
    if kept >= MOSTLY * there:
        return (
            ", because parameters, gradients and optimizer state, which autocast leaves as they are, take "
            f"{share} at the peak, which sits {where}{added}"
        )
    less = [change for change in changes.items() if change[1] <= -0.01 * there]
    if less and more:
        return f", because what some kinds save is taken by others: {_listed(less + more)}"
    return ""


def _changes(row: Row, base: Row) -> dict[str, float]:
    """Kind -> MiB at the arm's peak minus those at the reference arm's, the largest changes first."""
    here, there = row.memory["by_kind"], base.memory["by_kind"]
    apart = {kind: (here.get(kind, 0) - there.get(kind, 0)) / MIB for kind in {**there, **here}}
    return dict(sorted(apart.items(), key=lambda change: -abs(change[1])))


def _listed(changes: list[tuple[str, float]]) -> str:
    """`saved activations take 28 MiB less, weight casts 1.5 more`."""
    told = [(kind, mib(abs(apart)), "more" if apart > 0 else "less") for kind, apart in changes[:NAMED]]
    (kind, size, word), *rest = told
    verb = "take" if kind in _PLURAL else "takes"
    first = f"{kind.replace('_', ' ')} {verb} {size} MiB {word}"
    return ", ".join([first, *(f"{kind.replace('_', ' ')} {size} {word}" for kind, size, word in rest)])


def mib(value: float) -> str:
    """Three digits that count: `0.124`, `28`, `4,096`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
