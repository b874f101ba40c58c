"""Credentials kept out of all that is written or shown: known by the names they stand under."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NAMES = "(api_?key|access_?key|token|secret|password|passwd|credentials?)"
_SECRET_KEY = re.compile(rf"(^|[_.-]){_NAMES}$", re.IGNORECASE)


# An override of the command line: `+model.api_key=...`
_SECRET_WORD = re.compile(rf"^([\w+.@/-]*?(^|[_.-]){_NAMES}=)(?!\[redacted\]).+", re.IGNORECASE | re.DOTALL)
# One that gives a whole dict: `+model.kwargs={api_key:...}`
_OVERRIDE = re.compile(r"^[\w+~.@/-]+=")
_SECRET_ITEM = re.compile(
    rf"([{{,\s'\"](?:[\w.-]*[_.-])?{_NAMES}['\"]?\s*:\s*)(?!\[redacted\])[^,}}\]]+", re.IGNORECASE
)


def secrets_in(environment: Mapping[str, str], values: Any = None, words: Iterable[str] = ()) -> list[str]:
    """The texts that look like credentials: of environment variables by name, of config values and overrides by key.

    Short ones are no secrets: they would be found in anything.
    """
    found = [value for name, value in environment.items() if _SECRET_KEY.search(name)]
    found += [*_under_secret_keys(values), *_in_overrides(words)]
    return [value for value in found if len(value) >= 8]


def _in_overrides(words: Iterable[str]) -> Iterator[str]:
    """What stands behind a secret-looking key, as it was typed, and each value of several."""
    for word in words:
        matches = [*_SECRET_WORD.finditer(word), *(_SECRET_ITEM.finditer(word) if _OVERRIDE.match(word) else ())]
        for match in matches:
            typed = match.group().removeprefix(match.group(1))
            yield from dict.fromkeys(part.strip("'\"[] ") for part in (typed, *typed.split(",")))


def _under_secret_keys(values: Any, secret: bool = False) -> Iterator[str]:
    """All texts and numbers below a secret-looking key, as text, however deep."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _under_secret_keys(value, secret or bool(_SECRET_KEY.search(str(key))))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _under_secret_keys(value, secret)
    elif secret and values is not None and not isinstance(values, bool):
        yield str(values)


def redact(values: Any, secrets: list[str]) -> Any:
    """Replace values under secret-looking keys, and known secrets inside any text."""
    if isinstance(values, dict):
        return {
            key: "[redacted]" if value is not None and _SECRET_KEY.search(str(key)) else redact(value, secrets)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [redact(value, secrets) for value in values]
    if isinstance(values, str):
        values = _SECRET_WORD.sub(r"\1[redacted]", values)
        if _OVERRIDE.match(values):
            values = _SECRET_ITEM.sub(r"\1[redacted]", values)
        for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
            # a folder's name has it in small letters
            values = re.sub(re.escape(secret), "[redacted]", values, flags=re.IGNORECASE)
    return values
