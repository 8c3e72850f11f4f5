"""``SourceEntry``: one source of a list, with the fields of a recipe's ``data`` entries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coat_data.containers.remote_file import is_url
from coat_data.sample import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source and the selection of its rows."""

    name: str
    path: str
    """Absolute path, pattern or address."""
    media_root: str | None = None
    """Absolute folder; None for the folder of ``path``."""
    format: str | None = None
    """Name of a reader; None to detect it by content."""
    select: str | None = None
    """``first 1000``, ``last 10%``, ``random 50%``; None for all rows."""
    seed: int | None = None
    """Seed of a random ``select``; None for the recipe's seed, or 0 without a recipe."""
    repeat: float | None = None
    """Passes per epoch; None for 1."""
    weight: float | None = None
    """Share of an epoch relative to the other sources."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of :data:`coat_data.readers.fields.COLUMNS` -> columns of the file."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of the rows that may be left out although they look like media or loss weights."""
    supervise: Literal["all", "last"] = "all"
    """Which answers of a conversation are supervised."""
    field_map: Mapping[str, str] = field(default_factory=dict)
    """The reader's field names -> field names of the file (LlamaFactory). Not a key of recipes."""
    ignored: tuple[str, ...] = ()
    """Keys of the list that are ignored, for a warning. Not a key of recipes."""


def absolute(path: str, listing: Path) -> str:
    """Return ``path`` relative to the folder of ``listing``, made absolute; URLs are unchanged."""
    if is_url(path):
        return path
    return str((listing.parent / Path(path).expanduser()).absolute())


def positive(value: object, name: str, where: str) -> float:
    """Return the value; DataError if it is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(where, f"{name} is {value!r}", "give a number above 0")
    return float(value)


def text(value: object, name: str, where: str) -> str:
    """Return the value; DataError if it is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise DataError(where, f"{name} is {value!r}", "give a text")
    return value
