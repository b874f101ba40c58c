"""The error that is the user's to mend, and the end of a process that has said its words. Imports nothing."""

MOST = 2**31 - 1  # of whatever is counted


class InputError(Exception):
    """The user's input is wrong or this machine cannot do what was asked.

    The text is one or two sentences: what is wrong, where, what is valid. It is printed
    without a traceback and the process ends with exit code 2. Of several, each is a line.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class OwnCodeFailed(InputError):
    """Code of the user's own raised, called to build what the input names. Another job may call it well."""


def require(condition: bool, sentence: str) -> None:
    """Raise InputError with the sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence)


def at_least(key: str, value: float | None, minimum: float, most: float = MOST) -> None:
    """Raise InputError if there is a value and it is below the minimum or above `most`, or NaN."""
    require(value is None or value >= minimum, f"{key}={value} is too small; it must be at least {minimum}.")
    require(value is None or value <= most, f"{key}={value} is too large; it must be at most {most}.")


class Ended(Exception):
    """The process is to end with this exit code; what there was to say has been said."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code
