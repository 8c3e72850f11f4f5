"""Which rows of a source take part: the first, the last or random ones."""

import re
import zlib

import numpy as np

from coat_data.mixture import Stream, generator

_SELECT = re.compile(r"(first|last|random) (\d+(?:\.\d+)?)(%?)")


def parse_select(select: str) -> tuple[str, float, bool]:
    """What ``first 1000`` or ``random 10%`` asks for: where, how much, and whether in percent.

    Raises:
        ValueError: it is something else, nothing, part of a row, or more than 100%.
    """
    found = _SELECT.fullmatch(select.strip())
    if found is None:
        raise ValueError(
            f"select={select!r} is not understood; write first, last or random and a number of "
            "rows or a percentage, such as 'first 1000' or 'random 10%'"
        )
    kind, amount, percent = found[1], float(found[2]), bool(found[3])
    if not amount > 0 or (percent and amount > 100) or not (percent or amount.is_integer()):
        raise ValueError(
            f"select={select!r}: ask for a whole number of rows above 0, or more than 0% and at "
            "most 100%"
        )
    return kind, amount, percent


def select_rows(size: int, select: str | None, seed: int, name: str) -> np.ndarray:
    """The rows of a source that ``select`` asks for, in ascending order.

    Args:
        size: rows of the source.
        select: see :func:`parse_select`; None for all.
        seed: of ``random``, together with the name, so that sources differ.
        name: the source's.

    Returns:
        (n,) int64.

    Raises:
        ValueError: it asks for more rows than there are, or for a percentage that is no row.
    """
    if select is None:
        return np.arange(size)
    kind, amount, percent = parse_select(select)
    number = round(size * amount / 100) if percent else int(amount)
    if not 0 < number <= size:
        raise ValueError(
            f"{name}: select={select!r} is {number} of its {size} rows; choose 1 to {size} rows, "
            "or remove the source"
        )
    if kind == "first":
        return np.arange(number)
    if kind == "last":
        return np.arange(size - number, size)
    rng = generator(seed, Stream.PARTIAL_PASS, zlib.crc32(name.encode()))
    return np.sort(rng.permutation(size)[:number])
