"""Rows of a folder written by ``coat-vlm data ingest``: samples as they were checked."""

from typing import Any

from coat_data.containers import ingested
from coat_data.containers.ingested import Record
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample

NAME = "ingested"
SUMMARY = "a folder written by coat-vlm data ingest"


def matches(row: Any) -> bool:
    """Whether the row is one of a shard."""
    return isinstance(row, Record)


def to_sample(row: Any, place: Place) -> Sample:
    """The stored sample, with absolute media paths.

    Raises:
        DataError: a media path leaves the media root.
    """
    if not isinstance(row, Record):
        raise DataError(place.where, "the row is no stored sample", "give an ingested folder")
    return ingested.to_sample(row, source=place.source, root=place.root)
