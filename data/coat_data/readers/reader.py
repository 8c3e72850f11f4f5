"""What a reader is, and how it checks the fields of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from coat_data.media.root import MediaRoot
from coat_data.sample import DataError, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row stands, and where its media paths start."""

    source: str
    """The file, for messages."""
    row: int
    """The row in it, from 0."""
    root: MediaRoot
    columns: Mapping[str, str] = field(default_factory=dict)
    """The user's names of fields, by the reader's (LlamaFactory's ``columns`` and ``tags``)."""

    @property
    def where(self) -> str:
        """``file:row`` for messages."""
        return f"{self.source}:{self.row}"


class Reader(Protocol):
    """A module of this package: one kind of row."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a constant of the module
        """What ``--format`` and a recipe's ``format`` call it."""
        ...

    @property
    def SUMMARY(self) -> str:  # noqa: N802
        """One line for ``--help``."""
        ...

    def matches(self, row: Any) -> bool:
        """Whether a raw row is of this kind, by its fields; takes any value."""
        ...

    def to_sample(self, row: Any, place: Place) -> Sample:
        """The checked sample of a row, or a :class:`DataError` and nothing else.

        Does not decode media.
        """
        ...


def kind_of(value: object) -> str:
    """The type of a JSON value, for messages."""
    return "null" if value is None else type(value).__name__


def as_object(row: object, where: str) -> Mapping[str, Any]:
    """The row, or a DataError if it is not an object."""
    if not isinstance(row, Mapping):
        raise DataError(
            where, f"the row is {kind_of(row)}, not an object", "write one JSON object per row"
        )
    return row


def as_string(value: object, name: str, where: str) -> str:
    """The value, or a DataError if it is not a string of characters."""
    if not isinstance(value, str):
        raise DataError(where, f"{name} is {kind_of(value)}, not a string", f"make {name} a string")
    try:
        value.encode("utf-8")  # half a surrogate pair parses as JSON but is not a character
    except UnicodeEncodeError as error:
        raise DataError(
            where, f"{name} has a broken character at {error.start}", "remove the \\ud... escape"
        ) from error
    return value


def as_list(value: object, name: str, where: str) -> Sequence[Any]:
    """The value, or a DataError if it is not a list."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(where, f"{name} is {kind_of(value)}, not a list", f"make {name} a list")
    return value


def is_missing(value: object) -> bool:
    """Whether a field counts as absent: null, an empty list, or Arrow's object of nulls."""
    if isinstance(value, Mapping):
        return all(item is None for item in value.values())
    return value is None or (isinstance(value, list | tuple) and not value)


def row_id(row: Mapping[str, Any], place: Place) -> str:
    """The row's id as text; the row number where it has none."""
    value = next((row[name] for name in ("id", "sample_id") if row.get(name) is not None), None)
    if value is None:
        return str(place.row)
    if isinstance(value, int):
        return str(value)
    return as_string(value, "id", place.where)


def continued(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """The sample; a document of whose row ``continues`` is true goes on in the next row."""
    goes_on = row.get("continues") is True and sample.is_document
    return replace(sample, continues=True) if goes_on else sample


def refuse_fields(row: Mapping[str, Any], names: Mapping[str, str], where: str) -> None:
    """Raise for a field that would have to be trained differently: what it asks for, by name."""
    for name, remedy in names.items():
        if not is_missing(row.get(name)):
            raise DataError(where, f"the row has {name}", remedy)


NOT_SFT = {
    "audio": "remove the rows with audio: only images and videos are read",
    "audios": "remove the rows with audio: only images and videos are read",
    "chosen": "this is preference data; make conversations with the chosen answer of it",
    "rejected": "this is preference data; make conversations with the chosen answer of it",
    "rejected_response": "this is preference data; make conversations with the better answer of it",
}
"""Fields that a conversation cannot stand for, and what to do about them."""
