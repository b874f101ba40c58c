"""The columns of benchmark.json: each one kind of step of one arm. What they are called, and when they are trusted.

A column is the plain dict of the file. The reference arm has a second copy, `again`: its ratio to the first is the
noise floor of such steps, whose interval has to hold 1. No torch.
"""

from typing import Any

from precision_lab.ratios import Ratio


def again(reference: str) -> str:
    """The label of the reference arm's second copy: `fp32 again`."""
    return f"{reference} again"


def kind_of_step(compiled: bool, with_data: bool) -> str:
    """`compiled, end to end`."""
    return f"{'compiled, ' if compiled else ''}{'end to end' if with_data else 'computing alone'}"


def floor_of(columns: list[dict[str, Any]], compiled: bool, with_data: bool) -> Ratio | None:
    """The ratio of the reference arm to itself in steps of that kind; None where there is no copy."""
    kind = (True, compiled, with_data)
    copies = (one for one in columns if (one["again"], one["compiled"], one["with_data"]) == kind and one["ratio"])
    return next((Ratio(**one["ratio"]) for one in copies), None)


def trusted(columns: list[dict[str, Any]], compiled: bool, with_data: bool) -> bool:
    """Whether the noise floor of steps of that kind holds 1."""
    floor = floor_of(columns, compiled, with_data)
    return floor is not None and floor.low <= 1 <= floor.high


def verdict(column: dict[str, Any], columns: list[dict[str, Any]]) -> str:
    """What a table says of a column: reference, noise floor, no verdict, or the word of its ratio."""
    if not column["ratio"]:
        return "reference"
    if column["again"]:
        return "noise floor"
    fit = trusted(columns, column["compiled"], column["with_data"])
    return Ratio(**column["ratio"]).word if fit else "no verdict"
