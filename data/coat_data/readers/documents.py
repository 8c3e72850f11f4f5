"""Documents to learn as a whole: a text per row, as C4, the Pile, FineWeb and plain files have it.

A document is an answer to nothing: the template ``plain`` trains all of it and its end.
"""

from collections.abc import Mapping
from typing import Any

from coat_data.readers.reader import Place, as_object, as_string, continued, row_id
from coat_data.readers.turns import caption_turns
from coat_data.sample import DataError, Sample

NAME = "documents"
SUMMARY = "a text per row (text or content), or plain .txt files: documents to learn as a whole"

_FIELDS = ("text", "content")


def matches(row: Any) -> bool:
    """Whether the row has a text and nothing that a special kind of row has."""
    return isinstance(row, Mapping) and any(isinstance(row.get(name), str) for name in _FIELDS)


def to_sample(row: Any, place: Place) -> Sample:
    """One document.

    Raises:
        DataError: there is no text, or it is empty.
    """
    row = as_object(row, place.where)
    own = place.columns.get("text")
    names = _FIELDS if own is None else (own,)
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise DataError(
            place.where,
            f"there is no text (fields: {', '.join(map(str, row)) or 'none'})",
            f"name the field one of {', '.join(names)}",
        )
    text = as_string(row[name], name, place.where)
    if not text.strip():
        raise DataError(place.where, f"{name} is empty", "fill it or remove the row")
    sample = Sample(
        id=row_id(row, place),
        turns=caption_turns([], text),
        source=place.source,
        row=place.row,
    )
    return continued(sample.check(), row)
