"""Sizes of memory and files: units of bytes, and a size in words. No torch."""

GIB, MIB = 2**30, 2**20


def unit(nbytes: int) -> tuple[str, int]:
    """The unit to show so many bytes in, and its bytes."""
    return ("GiB", GIB) if nbytes >= 1000 * MIB else ("MiB", MIB)  # a fourth digit would become an exponent


def size(nbytes: int) -> str:
    """`4.1 MiB`, `1.37 GiB`."""
    name, one = unit(nbytes)
    return f"{nbytes / one:.3g} {name}"
