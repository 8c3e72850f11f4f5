"""All readers, and the one that fits a source."""

from collections.abc import Iterable
from typing import Any

from coat_data.readers import (
    captions,
    cauldron,
    clips,
    documents,
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
    documents,
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


def find_reader(first_rows: Iterable[Any], path: str) -> Reader | None:
    """The reader of the first of ``first_rows`` that any reader knows.

    Args:
        first_rows: raw rows; a DataError stands for one that does not parse. No more are taken than
            needed and none is kept, since rows may hold media.
        path: the source, for messages.

    Returns:
        The reader; None if there are no rows.

    Raises:
        DataError: none knows any of them.
    """
    seen = None
    kind = ""
    for row in first_rows:
        for reader in READERS:
            if reader.matches(row):
                return reader
        seen = seen or _seen(row)
        kind = kind or type(row).__name__
    if not kind:
        return None
    found = seen or f"the first one is {kind}"
    raise DataError(path, f"the rows are of no known kind ({found})", _remedy())


def _seen(row: Any) -> str | None:
    if isinstance(row, dict):
        return f"fields: {', '.join(map(str, list(row)[:12])) or 'none'}"
    return row.problem if isinstance(row, DataError) else None


def _remedy() -> str:
    known = "; ".join(f"{reader.NAME}: {reader.SUMMARY}" for reader in READERS)
    return f"name the format with --format if it is one of these: {known}"
