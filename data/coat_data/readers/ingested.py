"""Rows of a folder written by ``coat-vlm data ingest``: samples as they were checked."""

from collections.abc import Mapping
from typing import Any

from coat_data import shards
from coat_data.readers.reader import Place
from coat_data.sample import Sample

NAME = "ingested"
SUMMARY = "a folder written by coat-vlm data ingest"


def matches(row: Any) -> bool:
    """Whether the row has the columns of a shard."""
    return isinstance(row, Mapping) and {"turns", "media", "row"} <= set(row)


def to_sample(row: Any, place: Place) -> Sample:
    """The stored sample, with absolute media paths.

    Raises:
        DataError: a media path leaves the media root.
    """
    return shards.to_sample(row, source=place.source, root=place.root)
