"""A cause that can be named, as a value. Refuses to know how it is found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """`where` is a module as in `named_modules()` ("": the model itself, or the task outside any module), "task", or
    the class of an optimizer. `certain`: it is a fault by itself; else it may explain one.
    """

    code: str
    where: str
    says: str
    remedy: str
    certain: bool = False
