"""Rows of a CSV that lists several clips of one video per record (Panda-70M), one row per clip."""

import ast
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coat_data.containers.csv_file import CsvRows
from coat_data.sample import DataError

CLIP = "__clip__"
"""The field that is added to a record: number of the clip, (start, end), caption."""

COLUMNS = frozenset({"videoID", "timestamp", "caption"})
"""The header by which such a file is known (snap-research/Panda-70M, README)."""


class ClipRows:
    """The clips of all records.

    Attributes:
        media_root: the file's folder.
    """

    random_access = True
    damage: DataError | None = None

    def __init__(self, path: Path) -> None:
        self._records = CsvRows(path)
        self.media_root = path.parent
        # A record that does not parse is one row, whose error says why.
        counts = array("q", [max(1, len(_clips_or_none(row))) for row in self._records.stream()])
        self._ends = np.cumsum(np.array(counts, dtype=np.int64), dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[record - 1]) if record else 0)
        row = self._records[record]
        clips = _clips(row, f"{self._records.path}:{record}")
        return {**row, CLIP: clips[number]}

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of one that does not parse."""
        for index in range(len(self)):
            try:
                yield self[index]
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The file and the record."""
        record = int(np.searchsorted(self._ends, index, side="right"))
        return str(self._records.path), record


def _clips_or_none(row: Any) -> list[Any]:
    try:
        return [] if isinstance(row, DataError) else _clips(row, "")
    except DataError:
        return []


def _clips(row: dict[str, Any], where: str) -> list[tuple[int, tuple[str, str], str]]:
    """Number, (start, end) and caption of every clip.

    Both columns are lists in Python's notation, the first of pairs of times.
    """
    try:
        times, captions = ast.literal_eval(row["timestamp"]), ast.literal_eval(row["caption"])
        pairs = [
            (number, (str(start), str(end)), str(caption))
            for number, ((start, end), caption) in enumerate(zip(times, captions, strict=True))
        ]
    except (ValueError, TypeError, SyntaxError, KeyError, MemoryError, RecursionError) as error:
        raise DataError(
            where,
            f"timestamp and caption are no lists of equal length: {error}",
            "write [['0:00:01.0', '0:00:02.5'], ...] and ['caption', ...]",
        ) from error
    if not pairs:
        raise DataError(where, "the record lists no clip", "remove it")
    return pairs
