"""All readers, and the one that fits a source."""

from collections.abc import Iterable
from typing import Any

from coat_data.containers.ingested import Record
from coat_data.readers import captions, documents, llava, messages, pairs, webdataset
from coat_data.readers.reader import Place, Reader
from coat_data.sample import DataError, Media, Part, Sample, Turn


def _stored(row: Any, place: Place) -> Sample:
    """The sample that :func:`coat_data.containers.ingested.to_record` stored, as it was checked.

    Raises:
        DataError: the path of a file to be opened leaves the media root.
    """
    if not isinstance(row, Record):
        raise DataError(place.where, "the row is no stored sample", "give an ingested folder")
    where = f"{place.source}:{row['row']}"
    media = [dict(entry) for entry in row["media"]]
    for entry in media:
        # Of stored bytes the path is only a name; nothing is opened.
        stored = entry["data"] is not None
        path = entry["path"]
        entry["path"] = place.root.name(path) if stored else place.root.file(path, where)
    return Sample(
        id=row["id"],
        turns=tuple(
            Turn(turn["role"], tuple(Part(**part) for part in turn["parts"]))
            for turn in row["turns"]
        ),
        media=tuple(Media(**entry) for entry in media),
        source=place.source,
        row=row["row"],
        continues=bool(row["continues"]),
    )


READERS = (
    Reader(
        "ingested",
        "a folder written by coat-vlm data ingest",
        lambda row: isinstance(row, Record),
        _stored,
    ),
    webdataset.READER,
    captions.FILES,
    llava.READER,
    messages.READER,
    pairs.CAULDRON,
    documents.INTERLEAVED,
    captions.VIDEO_SETS,
    pairs.QUERY,
    captions.COLUMNS,
    documents.TEXTS,
)
"""The first one that matches reads a source: special kinds stand before general ones."""


def reader_named(name: str) -> Reader:
    """The reader that a user names.

    Raises:
        ValueError: there is none of this name.
    """
    for reader in READERS:
        if name == reader.name:
            return reader
    names = ", ".join(reader.name for reader in READERS)
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
    known = "; ".join(f"{reader.name}: {reader.summary}" for reader in READERS)
    remedy = f"name the format with --format if it is one of these: {known}"
    raise DataError(path, f"the rows are of no known kind ({found})", remedy)


def _seen(row: Any) -> str | None:
    if isinstance(row, dict):
        return f"fields: {', '.join(map(str, list(row)[:12])) or 'none'}"
    return row.problem if isinstance(row, DataError) else None
