"""Lists problems of rows, equal ones in one line."""

import re
from collections.abc import Callable, Sequence

from tqdm import tqdm

from coat_data.sample import DataError

SHOWN = 3
"""Rows with equal problems that are printed in full."""

_MAX_RANGES = 8
_WHERE = re.compile(r"(?P<file>.*?):(?P<row>\d+)(?::\s.*)?$", re.DOTALL)
_OWN = re.compile(r"'[^']*'|\d+")  # what differs between equal problems: quoted names, and numbers


class ProblemList:
    """Prints problems as they come; counts those that differ only in media, quotes and numbers."""

    def __init__(self, say: Callable[[str], None], shown: int = SHOWN) -> None:
        """Print with ``say``, and only the first ``shown`` of equal problems as they come."""
        self._say = say
        self._shown = shown
        self._equal: dict[tuple[str, str], list[DataError]] = {}

    def add(self, error: DataError) -> None:
        """Print a problem, unless enough equal ones have been printed."""
        equal = self._equal.setdefault((_OWN.sub("", error.problem), error.remedy), [])
        equal.append(error)
        if len(equal) <= self._shown:
            with tqdm.external_write_mode():  # so that a progress bar and the lines do not mix
                self._say(str(error))

    def finish(self) -> None:
        """Print a line with count and rows for each problem that not all lines were printed of."""
        for equal in self._equal.values():
            if len(equal) > self._shown:
                self._say(_summarize(equal))


def _summarize(errors: Sequence[DataError]) -> str:
    """Return one line for equal problems: the first one, the number, and the rows."""
    if len(errors) == 1:
        return str(errors[0])
    found = [_WHERE.match(error.where) for error in errors]
    files = dict.fromkeys(match["file"] if match else "" for match in found)
    rows = sorted(int(match["row"]) for match in found if match)
    number = "in one file" if len(files) == 1 else f"in {len(files)} files"
    return (
        f"{len(errors)} rows {number} have this problem: {errors[0]} (rows {_format_ranges(rows)})"
    )


def _format_ranges(rows: Sequence[int]) -> str:
    """Format ascending numbers as ranges: ``0-4, 7``."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row - ranges[-1][1] <= 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MAX_RANGES]]
    return ", ".join([*words, *(["..."] if len(ranges) > _MAX_RANGES else [])])
