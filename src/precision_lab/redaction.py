"""Credentials kept out of all that is written or shown: known by the names they stand under."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_SECRET_KEY = re.compile(r"(^|[_.-])(api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)


# An override of the command line: `+model.api_key=...`
_SECRET_WORD = re.compile(
    rf"^([\w+.@/-]*?{_SECRET_KEY.pattern.removesuffix('$')}=)(?!\[redacted\]).+", re.IGNORECASE | re.DOTALL
)


def secrets_in(environment: Mapping[str, str], values: Any = None) -> list[str]:
    """The texts that look like credentials: environment variables by name, config values by key.

    Short ones are no secrets: they would be found in anything.
    """
    found = [value for name, value in environment.items() if _SECRET_KEY.search(name)]
    return [value for value in found + list(_under_secret_keys(values)) if len(value) >= 8]


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
        for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
            values = values.replace(secret, "[redacted]")
    return values
