"""All readers, and the one that fits a source."""

from collections.abc import Sequence
from typing import Any

from coat_data.readers import (
    captions,
    cauldron,
    clips,
    ingested,
    llava,
    media_files,
    messages,
    mmc4,
    query,
    webdataset,
)
from coat_data.readers.reader import Reader
from coat_data.sample import DataError

READERS: tuple[Reader, ...] = (
    ingested,
    webdataset,
    media_files,
    llava,
    messages,
    cauldron,
    mmc4,
    clips,
    query,
    captions,
)
"""The first one that matches reads a source: special kinds stand before general ones."""


def reader_named(name: str) -> Reader:
    """The reader that a user names.

    Raises:
        ValueError: there is none of this name.
    """
    for reader in READERS:
        if name == reader.NAME:
            return reader
    names = ", ".join(reader.NAME for reader in READERS)
    raise ValueError(f"format is {name!r}; allowed: {names}")


def find_reader(first_rows: Sequence[Any], path: str) -> Reader:
    """The reader of the first of ``first_rows`` that any reader knows.

    Args:
        first_rows: raw rows; a DataError stands for one that does not parse.
        path: the source, for messages.

    Raises:
        DataError: none knows any of them.
    """
    for row in first_rows:
        for reader in READERS:
            if reader.matches(row):
                return reader
    raise DataError(path, f"the rows are of no known kind ({_seen(first_rows)})", _remedy())


def _seen(rows: Sequence[Any]) -> str:
    for row in rows:
        if isinstance(row, dict):
            return f"fields: {', '.join(map(str, list(row)[:12])) or 'none'}"
        if isinstance(row, DataError):
            return row.problem
    return f"the first one is {type(rows[0]).__name__}" if rows else "there are no rows"


def _remedy() -> str:
    known = "; ".join(f"{reader.NAME}: {reader.SUMMARY}" for reader in READERS)
    return f"name the format with --format if it is one of these: {known}"
