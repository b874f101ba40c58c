"""What is to be feared in float16 and bfloat16, in sentences, from what a run's watch has recorded. No torch.

Knows the lines of `probe/ranges.jsonl`, as `probe/watch.py` describes them. Each sentence is a prediction, and says so.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOST_IS_MUCH = 0.1  # share of the updates, on average over the steps watched
_IN_WORDS = {
    "activation_gradient": "the gradient at the output of {}",
    "weight_gradient": "the gradient of the weights of {}",
}


def lines_in(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of ranges.jsonl that can be read, the oldest first; none where there is no file."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def sentences(lines: Iterator[dict[str, Any]], min_scale: float) -> list[str]:
    """One for each kind of trouble: activations that overflow, gradients without a loss scale, updates that are lost.

    `min_scale` is the loss scale below which a run counts as diverged.
    """
    seen = list(lines)
    found = [_overflow(seen, name) for name in ("float16", "bfloat16")]
    found += [_no_scale(seen, min_scale) or _scales(seen), _lost(seen)]
    return [f"prediction for {sentence}" for sentence in found if sentence]


def _overflow(lines: list[dict[str, Any]], dtype: str) -> str | None:
    """Where the activations of a module overflow: the module with the largest headroom."""
    over = {}  # module -> (headroom, amax, step), the largest
    for line in lines:
        for name, module in line["modules"].items():
            if (one := module.get("activation")) and one[dtype]["overflow"]:
                over[name] = max(over.get(name, (0,)), (one[dtype]["headroom"], one["amax"], line["step"]))
    if not over:
        return None
    name = max(over, key=lambda name: over[name][0])
    headroom, amax, step = over[name]
    others = f" (as do {len(over)} modules in all)" if len(over) > 1 else ""
    cure = f"; precision.fp32_modules=[{name}] keeps it in float32" if name else ""
    return (
        f"{dtype}: the output of {_module(lines, name)} reaches {amax:,.6g} after step {step}, {headroom:.3g} times "
        f"the largest number of {dtype}, and overflows where it is held in it{others}{cure}."
    )


def _no_scale(lines: list[dict[str, Any]], min_scale: float) -> str | None:
    """The last step at which no loss scale of at least `min_scale` suited the gradients."""
    for line in reversed(lines):
        window = line["scale_window"]
        if not window or (window["avoids_both"] and window["highest"] >= min_scale):
            continue
        above = f"above a loss scale of {window['highest']:g} {_quantity(lines, window['limited_above_by'])} overflows"
        if window["avoids_both"]:
            return f"float16: {above} after step {line['step']}, and precision.min_scale is {min_scale:g}."
        below = f"below {window['lowest']:g} too many gradients are flushed to zero"
        most = f"most of them in {_quantity(lines, window['limited_below_by'])}"
        return f"float16: no loss scale suits the gradients after step {line['step']}: {above}, and {below}, {most}."
    return None


def _scales(lines: list[dict[str, Any]]) -> str | None:
    """The loss scales that the gradients need, if 1 is none: of the step that needs the largest one."""
    needed = [(line["scale_window"]["lowest"] or 0, line["step"], line) for line in lines if line["scale_window"]]
    lowest, step, line = max(needed, key=lambda one: one[:2], default=(0, 0, {}))
    if lowest <= 1:
        return None
    window = line["scale_window"]
    return (
        f"float16: gradients need loss scaling, by {lowest:,g} to {window['highest']:,g} after step {step}; below that "
        f"too many are flushed to zero, most of them in {_quantity(lines, window['limited_below_by'])}."
    )


def _lost(lines: list[dict[str, Any]]) -> str | None:
    """Updates that weights held in bfloat16 would lose."""
    shares = [
        (line["lost_updates"]["lost_bfloat16"], line["step"])
        for line in lines
        if line["lost_updates"] and "lost_bfloat16" in line["lost_updates"]
    ]
    mean = sum(lost for lost, _ in shares) / max(1, len(shares))
    if mean < LOST_IS_MUCH:
        return None
    most, step = max(shares)
    return (
        f"bfloat16: weights held in it, as in bf16_pure, would lose {mean:.3g} of the updates, the mean of "
        f"{len(shares)} steps (most in step {step}: {most:.3g}); float32 weights, as in bf16, keep them."
    )


def _quantity(lines: list[dict[str, Any]], key: list[str]) -> str:
    module, quantity = key
    return _IN_WORDS[quantity].format(_module(lines, module))


def _module(lines: list[dict[str, Any]], name: str) -> str:
    kind = next(line["modules"][name]["type"] for line in lines if name in line["modules"])
    return f"{name or 'the whole model'} ({kind})"
