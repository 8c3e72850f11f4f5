"""Base of all readers: the place of a row, and checks of its fields.

Readers raise DataError, with file and row, for what they cannot read, and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coat_data.media.root import MediaRoot
from coat_data.readers.boxes import convert_tags
from coat_data.readers.fields import Row, check_unused, find_placeholder, is_missing
from coat_data.readers.preference import REJECTED, add_rejected, is_pair, split_pair, with_chosen
from coat_data.sample import DataError, Media, Reading, Sample, Turn, row_name, starts_with_answer
from coat_data.text.message_fields import read_tools

_WITH_TOOLS = ("llava", "messages", "query")
_MEDIA = ("image", "images", "video", "videos", "video_path")
"""Fields that are null in the rows without media of many sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a row in its source, and the root of its media paths."""

    source: str
    """File name, for messages."""
    row: int
    """Row in the file, from 0."""
    root: MediaRoot
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's field names -> field names of the file (LlamaFactory's columns and tags)."""
    ignore: frozenset[str] = frozenset()
    """Fields that the user allows to be left out."""
    keep_boxes: bool = False
    """Whether boxes stay as they are in the row."""
    notes: list[str] = field(default_factory=list)
    """Keys of :data:`~coat_data.sample.NOTES` that the reader of the row adds."""
    turn_fields: dict[str, bool] = field(default_factory=dict)
    """Fields of turns, such as ``messages[].tool_calls`` -> whether the reader used them."""

    @property
    def where(self) -> str:
        """``file:row`` for messages, counted from 1."""
        return row_name(self.source, self.row)

    def sample(
        self, row: Mapping[str, Any], turns: Sequence[Turn], media: Sequence[Media] = ()
    ) -> Sample:
        """Return the checked sample of a row, with the row's ``id`` and ``continues``."""
        turns = convert_tags(turns, self.where, has_media=bool(media), keep=self.keep_boxes)
        own = {"id": self.row_id(row), "source": self.source, "row": self.row}
        sample = Sample(turns=turns, media=tuple(media), **own).check()
        goes_on = sample.is_document and row.get("continues") is True
        return replace(sample, continues=True) if goes_on else sample

    def error(self, problem: str, remedy: str) -> DataError:
        """Return the error of the row."""
        return DataError(self.where, problem, remedy)

    def as_object(
        self, value: object, name: str = "the row", remedy: str = "write one JSON object per row"
    ) -> Mapping[str, Any]:
        """Return the value; DataError if it is not an object."""
        if not isinstance(value, dict | Mapping):  # dict first: Mapping is checked in Python
            raise self.error(f"{name} is {kind_of(value)}, not an object", remedy)
        return value

    def as_string(self, value: object, name: str) -> str:
        """Return the value; DataError if it is not a string of valid characters."""
        if not isinstance(value, str):
            raise self.error(f"{name} is {kind_of(value)}, not a string", f"make {name} a string")
        if value.isascii():
            return value
        try:
            value.encode("utf-8")  # a lone surrogate parses as JSON but is not a character
        except UnicodeEncodeError as error:
            problem = f"{name} has a broken character at {error.start}"
            raise self.error(problem, "remove the \\ud... escape") from error
        return value

    def as_list(self, value: object, name: str) -> Sequence[Any]:
        """Return the value; DataError if it is not a list."""
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.error(f"{name} is {kind_of(value)}, not a list", f"make {name} a list")
        return value

    def as_strings(self, value: object, name: str) -> list[str]:
        """Return the strings of a list."""
        items = self.as_list(value, name)
        return [self.as_string(item, f"{name}[{number}]") for number, item in enumerate(items)]

    def as_objects(self, value: object, name: str, remedy: str) -> list[Mapping[str, Any]]:
        """Return the objects of a list."""
        items = enumerate(self.as_list(value, name))
        return [self.as_object(item, f"{name}[{number}]", remedy) for number, item in items]

    def row_id(self, row: Mapping[str, Any]) -> str:
        """Return the row's id as text; the row number if there is none."""
        value = row.get("id")
        value = row.get("sample_id") if value is None else value
        if isinstance(value, float):  # pandas writes a column of numbers with gaps as such
            value = int(value) if value.is_integer() else str(value) if value == value else None
        if value is None:
            return str(self.row)
        if isinstance(value, int):
            return str(value)
        return self.as_string(value, "id")

    def refuse(self, row: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Raise DataError for unsupported fields; ``names`` maps them to remedies."""
        for name, remedy in names.items():
            if name in row and not is_missing(row[name]):
                raise self.error(f"the row has {name}", remedy)


@dataclass(frozen=True, slots=True)
class Reader:
    """One row format."""

    name: str
    """Name for ``--read-as`` and a recipe's ``format``."""
    summary: str
    """One line for ``--help``."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Whether a raw row has this format, by its fields."""
    to_sample: Callable[[Any, Place], Sample]
    """Returns the checked sample of a row; raises only :class:`DataError`; decodes no media."""

    def recognizes(self, row: Any) -> bool:
        """Whether a raw row has this format, also with a pair of answers in place of the last.

        Fields that are null do not count, except for media.
        """
        row = with_chosen(row)
        if not isinstance(row, Mapping):
            return False
        if type(row) is dict:
            row = {name: row[name] for name in row if row[name] is not None or name in _MEDIA}
        return self.matches(row)

    def read(self, row: Any, place: Place) -> Sample:
        """Return the sample of a row with its :class:`~coat_data.sample.Reading`."""
        if type(row) is not dict:
            return self.to_sample(place.as_object(row), place)
        pair = split_pair(row, place.where, place.ignore) if is_pair(row) else None
        row = Row(row if pair is None else pair.row)
        sample = self.to_sample(row, place)
        if self.name in _WITH_TOOLS:
            sample = self._add_tools(sample, row, place)
        used, unused = row.keys() & row.used, row.keys() - row.used
        if pair is not None:
            if REJECTED not in place.ignore:
                rejected = place.as_string(pair.rejected, REJECTED)
                sample = add_rejected(sample, rejected, keep_boxes=place.keep_boxes)
            used = used - {pair.added} | pair.fields
        if unused:
            check_unused(row, unused, place.ignore, place.where, sample)
        noted = "placeholder_as_text" in place.notes  # by a reader that knows that it is text
        if not noted and find_placeholder(sample, place.ignore):
            place.notes.append("placeholder_as_text")
        if starts_with_answer(sample.turns):
            place.notes.append("answer_first")
        inner = sample.reading
        notes = tuple(dict.fromkeys(place.notes))
        used |= {name for name, is_used in place.turn_fields.items() if is_used}
        unused |= place.turn_fields.keys() - used
        reading = Reading(inner.used.union(used), inner.ignored.union(unused), notes)
        # Nobody else has the new sample; a copy of it takes as long as reading its turns.
        object.__setattr__(sample, "reading", reading)
        return sample

    def _add_tools(self, sample: Sample, row: Row, place: Place) -> Sample:
        field = place.columns.get("tools", "tools")
        tools = None if field in place.ignore else row.get(field)
        try:
            return sample if is_missing(tools) else replace(sample, tools=read_tools(tools))
        except DataError as error:
            remedy = f"{error.remedy}, or leave it out with ignore_fields: [{field}]"
            raise place.error(f"{field} {error.problem}", remedy) from error


def has_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a :attr:`Reader.matches` for rows that have all these fields."""
    return lambda row: set(names) <= set(row)


def kind_of(value: object) -> str:
    """Return the type of a JSON value, for messages."""
    return "null" if value is None else type(value).__name__
