"""All readers, and the detection of the reader for a source."""

import json
from collections.abc import Iterable
from typing import Any

from coat_data.containers.ingested import Record
from coat_data.readers import captions, documents, llava, messages, pairs, published, webdataset
from coat_data.readers.boxes import rewrite_boxes
from coat_data.readers.reader import Place, Reader
from coat_data.sample import DataError, Media, Part, Sample, Turn, row_name
from coat_data.text.message_fields import read_fields


def _stored(row: Any, place: Place) -> Sample:
    if not isinstance(row, Record):
        raise place.error("the row is not a stored sample", "give an ingested folder")
    where = row_name(place.source, row["row"])
    media = [dict(entry) for entry in row["media"]]
    for entry in media:
        # With stored bytes the path is only a name; nothing is opened.
        stored = entry["data"] is not None
        path = entry["path"]
        entry["path"] = place.root.name(path) if stored else place.root.file(path, where)
        entry["frames"] = tuple(place.root.file(frame, where) for frame in entry["frames"])
    sample = Sample(
        id=row["id"],
        turns=tuple(
            Turn(
                turn["role"],
                tuple(Part(**part) for part in turn["parts"]),
                turn["supervised"],
                **read_fields(fields, turn["role"])[0],
            )
            for turn, fields in zip(row["turns"], json.loads(row["fields"]), strict=True)
        ),
        media=tuple(Media(**entry) for entry in media),
        source=place.source,
        row=row["row"],
        continues=bool(row["continues"]),
        tools=tuple(json.loads(row["tools"])),
        rejected=row["rejected"],
        rejected_tagged=row["rejected_tagged"],
    )
    return rewrite_boxes(sample, "keep") if place.keep_boxes else sample


READERS = (
    Reader(
        "ingested",
        "a folder written by coat-vlm data ingest",
        lambda row: isinstance(row, Record),
        _stored,
    ),
    webdataset.READER,
    captions.FILES,
    published.PIXMO,
    llava.READER,
    messages.READER,
    documents.OBELICS,
    pairs.CAULDRON,
    documents.INTERLEAVED,
    captions.VIDEO_SETS,
    pairs.QUERY,
    published.CHOICES,
    published.VQA,
    pairs.QUESTION,
    captions.COLUMNS,
    published.LINKS,
    documents.TEXTS,
)
"""The first reader that matches is used: specific formats are listed before general ones."""
_BY_NAME = {reader.name: reader for reader in READERS}


def get_reader(name: str) -> Reader:
    """Return the reader with a name."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    names = ", ".join(reader.name for reader in READERS)
    raise ValueError(f"format is {name!r}; allowed: {names}")


def find_reader(first_rows: Iterable[Any], path: str) -> Reader | None:
    """Detect the reader of a source: the one of the first row that any reader matches.

    A row that does not parse yields its DataError. Rows may contain media and are not stored.
    """
    seen = None
    kind = ""
    for row in first_rows:
        for reader in READERS:
            if reader.recognizes(row):
                return reader
        if seen is None and isinstance(row, dict):
            seen = f"fields: {', '.join(map(str, list(row)[:12])) or 'none'}"
        elif seen is None and isinstance(row, DataError):
            seen = row.problem
        kind = kind or type(row).__name__
    if not kind:
        return None
    found = seen or f"the first one is {kind}"
    known = "; ".join(f"{reader.name}: {reader.summary}" for reader in READERS)
    remedy = (
        "map its columns, such as columns: {image: img_path, question: q, answer: a}, or name the "
        f"format (--read-as) if it is one of these: {known}"
    )
    raise DataError(path, f"the format of the rows is unknown ({found})", remedy)
