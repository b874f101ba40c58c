"""Several arms of one experiment, named by their labels: `fp32,bf16,fp16[fp32_modules=head]`. No torch."""

import re
from dataclasses import fields

from precision_lab import identity
from precision_lab.config import Config, PrecisionConfig, compose
from precision_lab.errors import InputError

_LABEL = re.compile(r"(\w+)(?:\[(.*)\])?")


def key_of(word: str) -> str:
    """`+trainer.steps=5` -> `trainer.steps`: what an override sets, or with a tilde takes away."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def group_of(word: str) -> str:
    """`+trainer.steps=5` -> `trainer`."""
    return key_of(word).partition(".")[0]


def arms_of(text: str, overrides: list[str]) -> dict[str, Config]:
    """label -> what a run of that arm with these overrides of train.py would be asked to do.

    The text is a list such as `[fp32,bf16]`, with or without its brackets. Nothing is swept but the arms, nothing is
    only checked, and since speed or memory is what they are compared for, none is emulated.
    """
    for word in overrides:
        if group_of(word) == "precision":
            raise InputError(f"{word} sets one arm's precision; here all arms are named together: arms=[fp32,bf16].")
        if word.lstrip("+") == "check=true":
            raise InputError("check=true is for train.py, which then says what it would run; leave it out here.")
        if key_of(word) == "seed" and "," in word:
            raise InputError(f"{word}: one seed is enough here; several are for train.py -m.")
        if word.startswith("-"):
            raise InputError(f"{word} is no override; write key=value, as for train.py.")
    labels = _split(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    arms = {}
    for label in labels:
        asked = compose([*overrides, *_overrides_of(label)])
        if target := asked.precision.emulate:
            raise InputError(
                f"arms: {label} is emulated, and its time and memory say nothing about {target.name}; leave it out."
            )
        arms[identity.arm_label(asked.precision)] = asked
    if not arms:
        raise InputError("arms is empty; name precisions: arms=[fp32,bf16].")
    if len(arms) < len(labels):
        raise InputError(f"arms={text} names an arm twice.")
    return arms


def _split(text: str) -> list[str]:
    """At commas that stand outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def _overrides_of(label: str) -> list[str]:
    """`fp16[fp32_modules=head+*.norm]` -> `precision=fp16 precision.fp32_modules=[head,*.norm]`."""
    parts = _LABEL.fullmatch(label)
    if not parts:
        raise InputError(
            f"arms: {label} is no arm; write its precision, with changes in brackets: fp16[init_scale=64]."
        )
    name, changes = parts.groups()
    lists = {field.name for field in fields(PrecisionConfig) if field.type == list[str]}
    words = [f"precision={name}"]
    for change in (changes or "").split(",") if changes else []:
        key, equals, value = change.strip().partition("=")
        if not equals:
            raise InputError(f"arms: {change} in {label} is no change; write key=value, such as fp16[init_scale=64].")
        words.append(f"precision.{key}=" + (f"[{value.replace('+', ',')}]" if key in lists else value))
    return words


def arm_text(name: str, overrides: list[str]) -> str | None:
    """`fp16` and `precision.fp32_modules=[head,*.norm]` -> `fp16[fp32_modules=head+*.norm]`, as arms_of takes it.

    None where a text cannot say it, as of an override with a plus or a name with a dash.
    """
    changes = []
    for word in overrides:
        key, _, value = word.removeprefix("precision.").partition("=")
        listed = value.startswith("[") and value.endswith("]")
        changes.append(f"{key}={value[1:-1].replace(',', '+') if listed else value}")
    text = name + (f"[{','.join(changes)}]" if changes else "")
    try:
        says = _overrides_of(text) if _split(text) == [text] else []
    except InputError:
        return None
    return text if says == [f"precision={name}", *overrides] else None
