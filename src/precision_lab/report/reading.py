"""A comparison in plain sentences: what each arm did to speed, memory and loss on this machine."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from precision_lab.report.compare import Comparison, Estimate, Row
from precision_lab.report.loss import CONFIDENCE, MORE_SEEDS, PAIRS_FOR_A_VERDICT, Loss, losses_of
from precision_lab.report.memory import memory_reasons
from precision_lab.report.read import plain

# Below this a step is mostly dispatch and casts, whatever the units do.
SHORT_STEP_MS = 5
# An interval of the speed ratio whose ends are a larger factor apart than this says nothing.
TOO_WIDE = 4
_LOW = ("bfloat16", "float16")


def reading(comparison: Comparison) -> list[str]:
    """Sentences on speed, on memory, on the loss and on runs that did not complete, as far as there is something."""
    told = [
        _speed(comparison),
        _memory(comparison),
        *memory_reasons(comparison),
        *_loss(comparison),
        _ends(comparison.rows),
    ]
    return [sentence for sentence in told if sentence]


def machine(fingerprint: dict[str, Any]) -> str:
    """`2-core Intel Xeon Processor`, `NVIDIA H200`."""
    model = re.sub(r"\((R|TM)\)", "", plain(str(fingerprint.get("model") or "machine")))
    model = re.sub(r"\s+", " ", model).strip()
    return f"{fingerprint.get('count')}-core {model}" if fingerprint.get("device") == "cpu" else model


def units(support: dict[str, str]) -> str:
    """`which has bfloat16 units and no float16 units`."""
    has = [name for name in _LOW if support.get(name) == "native"]
    lacks = [name for name in _LOW if name not in has]
    if not has:
        return "which has no bfloat16 and no float16 units"
    return f"which has {joined(has)} units" + (f" and no {lacks[0]} units" if lacks else "")


def joined(parts: list[str]) -> str:
    """`fp32, tf32 and bf16`."""
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def between(estimate: Estimate, form: Callable[[float], str]) -> str:
    """The mean with its interval: `0.75 [0.70, 0.81]`."""
    if estimate.low is None:
        return form(estimate.mean)
    return f"{form(estimate.mean)} [{form(estimate.low)}, {form(estimate.high)}]"


def unless_exact(estimate: Estimate, form: Callable[[float], str]) -> str:
    """The same without the interval, where that has the mean's digits: memory seldom varies."""
    ends = {form(bound) for bound in (estimate.low, estimate.high) if bound is not None}
    return form(estimate.mean) if ends <= {form(estimate.mean)} else between(estimate, form)


def ratio(value: float) -> str:
    """`0.75`; one far from 1 by its magnitude."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}"


def difference(value: float) -> str:
    """`-0.0014`: two digits that count, with the sign."""
    size = abs(value)
    if not 1e-6 <= size < 1000:
        return f"{value:+.2g}"
    return f"{value:+.{max(0, 1 - math.floor(math.log10(size)))}f}"


def _known(rows: list[Row], name: str) -> list[tuple[Row, Estimate]]:
    return [(row, row.against[name]) for row in rows if name in row.against]


def _speed(comparison: Comparison) -> str:
    known, base = _known(comparison.others, "speed_ratio"), comparison.reference
    if not known or not base:
        return ""
    timed = [one for one in known if one[0].timing]
    in_turn = [one for one in known if not one[0].timing]
    wide = [(row, speed) for row, speed in in_turn if speed.low is not None and speed.high > TOO_WIDE * speed.low]
    clear = [one for one in in_turn if one not in wide]
    parts = []
    for chosen, verb in ((timed, "timed in alternation, {} ran"), (clear, "{} trained")):
        if chosen:
            (first, speed), *rest = chosen
            told = [f"{verb.format(first.arm)} at {between(speed, ratio)} times the speed of {base.arm}"]
            told += [f"{row.arm} at {between(speed, ratio)}" for row, speed in rest]
            parts.append(f"{joined(told)}{_why_slower(comparison, chosen)}")
    parts += [
        f"the speed of {row.arm} is not resolved by {speed.pairs} pairs of seeds: {between(speed, ratio)}"
        for row, speed in wide
    ]
    return f"On this {machine(comparison.fingerprint)}, {units(comparison.newest.support)}, {'; '.join(parts)}."


def _why_slower(comparison: Comparison, known: list[tuple[Row, Estimate]]) -> str:
    """The reason for low-precision arms that are slower beyond doubt, as far as the figures tell one."""
    slower = [
        row for row, speed in known if (speed.mean if speed.high is None else speed.high) < 1 and row.dtype in _LOW
    ]
    emulated = [row.arm for row in slower if comparison.newest.support.get(row.dtype) == "emulated"]
    if emulated:
        return f" ({joined(emulated)}: what a machine has no units for, it converts back and forth)"
    step_ms = comparison.reference.figures["step_ms"].median
    if slower and step_ms < SHORT_STEP_MS:
        arms = joined([row.arm for row in slower])
        return f" ({arms}: in a step of {step_ms:.2g} ms, casts and dispatch may cost more than the units save)"
    return ""


def _memory(comparison: Comparison) -> str:
    base = comparison.reference
    saved, peak = (_known(comparison.others, name) for name in ("saved_ratio", "peak_ratio"))
    if not base or not saved + peak:
        return ""
    kinds = ((f"of what {base.arm} keeps for backward", "kept", saved), (f"of {base.arm}'s peak memory", "took", peak))
    parts = [f"{whole}, {_shares(known, verb)}" for whole, verb, known in kinds if known]
    alike = len({row.settings.get("param_dtype") for row in [base, *(row for row, _ in peak)]}) == 1
    hardly = all(0.9 < share.mean < 1.1 for _, share in peak) and any(share.mean < 0.8 for _, share in saved)
    guessed = peak and alike and hardly and not memory_reasons(comparison)
    why = ", since weights, gradients and optimizer state take as much in every arm" if guessed else ""
    text = f"{'; '.join(parts)}{why}."
    return text[0].upper() + text[1:]


def _shares(known: list[tuple[Row, Estimate]], verb: str) -> str:
    (first, share), *rest = known
    told = [f"{first.arm} {verb} {unless_exact(share, ratio)}"]
    return joined(told + [f"{row.arm} {unless_exact(share, ratio)}" for row, share in rest])


def horizon(config: dict[str, Any]) -> str:
    """`200 steps of batch 64`: how far a comparison's runs went, of its flat config."""
    steps, epochs = (config.get(f"trainer.{unit}") for unit in ("steps", "epochs"))
    length = f"{steps} step{'s' if steps != 1 else ''}" if steps else f"{epochs} epoch{'s' if epochs != 1 else ''}"
    parts = config.get("trainer.accumulation") or 1
    return f"{length} of batch {f'{parts} x ' if parts > 1 else ''}{config.get('trainer.batch_size')}"


def _loss(comparison: Comparison) -> list[str]:
    known, base = losses_of(comparison), comparison.reference
    if not known or not base:
        return []
    loss, margin = base.figures["val_loss_fp32"], comparison.config["verdict.loss_margin"]
    spread = f" (sd over {loss.n} seeds {loss.sd:.2g})" if loss.sd is not None else ""
    told = [
        f"After {horizon(comparison.config)} the validation loss, computed in float32, was {loss.mean:.4g} for "
        f"{base.arm}{spread}; a difference of less than {100 * margin:.3g} % of it counts as none."
    ]
    for arm, apart in known.items():
        estimate = Estimate(apart.pairs, apart.mean, apart.low, apart.high)
        pairs = f"{apart.pairs} pairs" if apart.pairs > 1 else "one pair"
        interval = f", {100 * CONFIDENCE:.0f} % interval over {pairs} of seeds" if apart.low is not None else ""
        told.append(f"{arm} differs by {between(estimate, difference)}{interval}: {loss_words(apart)}.")
    return told + _chance(comparison, known)


def loss_words(loss: Loss) -> str:
    """`worse (p = 0.031)`, `undecided, about 12 more seeds would tell`: the word, and what it takes or leaves open."""
    if loss.few:
        return f"undecided, since a verdict takes {PAIRS_FOR_A_VERDICT} pairs at least ({loss.more_seeds} more)"
    if loss.word == "undecided":
        if loss.more_seeds is None:
            return f"undecided, and more than {MORE_SEEDS} more seeds would be needed to tell"
        return f"undecided, about {loss.more_seeds} more seed{'s' if loss.more_seeds > 1 else ''} would tell"
    if loss.word == "equivalent":
        exact = ", equal to the last bit" if loss.low == loss.high == 0 else ""
        return "equivalent" + (", a real but negligible difference" if loss.negligible else exact)
    return f"{loss.word} (sign-flip test: p = {loss.p:.2g})"


def _chance(comparison: Comparison, known: dict[str, Loss]) -> list[str]:
    """How far a change in the last bit of the weights drives runs apart, beside what the arms did."""
    spread = {row.arm: known[row.arm] for row in comparison.others if row.arm in known}
    spread = {arm: loss for arm, loss in spread.items() if loss.sd is not None}
    controls = [row.arm for row in comparison.others if row.perturbed and row.arm in spread]
    if not controls:
        return []

    def told(arm: str) -> str:
        r = spread[arm].correlation
        return f"{spread[arm].sd:.2g} for {arm}" + (f" (r = {r:.3f})" if r is not None else "")

    arms = [arm for arm in spread if arm not in controls]
    beside = f", and {joined([told(arm) for arm in arms])}" if arms else ""
    return [
        f"Weights changed in their last bits alone drive runs of one seed apart by an sd of "
        f"{joined([told(arm) for arm in controls])}{beside}; r is the correlation with the reference arm over seeds."
    ]


def _ends(rows: list[Row]) -> str:
    """Runs that did not complete, with their reasons: two of the three ways are results as well."""
    words = {"diverged": "diverged", "out_of_memory": "ran out of memory", "failed": "failed"}
    told = []
    for row in rows:
        reasons = Counter((run.status, run.reason) for run in row.runs if run.status in words)
        for (status, reason), n in reasons.items():
            told.append(f"{n} of {row.statuses.total()} {row.arm} runs {words[status]} ({reason or 'no reason given'})")
    return f"{'; '.join(told)}." if told else ""
