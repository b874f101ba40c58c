"""What is common to the JSON files that a comparison reads: strict numbers, a schema, keys that have to be there."""

import json
from typing import Any


def object_in(text: bytes | str, file: str) -> tuple[dict[str, Any], str]:
    """(the object that a file's text holds, "") or ({}, why it is none)."""
    try:
        told = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return {}, f"{file} is damaged: no JSON"
    return (told, "") if isinstance(told, dict) else ({}, f"{file} is damaged: no object")


def lacking(told: dict[str, Any], schema: int, needed: dict[str, Any], file: str) -> str:
    """Why it is of no use: written by a newer version, or without a key of `needed`, name -> type; "" if it is."""
    newer = told.get("schema")
    if isinstance(newer, int) and newer > schema:
        return f"written by a newer version (schema {newer}; this one reads up to {schema})"
    for key, kind in needed.items():
        if not isinstance(told.get(key), kind) or isinstance(told[key], bool) is not (kind is bool):
            return missing(key, file)
    return ""


def missing(key: str, file: str) -> str:
    """The words for a key that is not as it has to be."""
    return f"{file} is damaged, or of an older version: {key} is missing or of a wrong type"


def _no_number(text: str) -> float:
    raise ValueError(text)  # NaN and Infinity are no JSON, and are never written
