"""Brace patterns of shard names: ``shard-{000..099}.tar`` and ``{a,b}.json``."""

import re
from collections.abc import Iterator
from itertools import product

_GROUP = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for; itself if it has no braces.

    A range keeps the width of its start: ``{08..10}`` is 08, 09, 10.
    """
    pieces: list[list[str]] = []
    end = 0
    for match in _GROUP.finditer(pattern):
        pieces += [[pattern[end : match.start()]], list(_values(match))]
        end = match.end()
    return ["".join(choice) for choice in product(*pieces, [pattern[end:]])]


def _values(match: re.Match[str]) -> Iterator[str]:
    start, stop, names = match.groups()
    if names is not None:
        yield from names.split(",")
        return
    for number in range(int(start), int(stop) + 1):
        yield str(number).zfill(len(start))
