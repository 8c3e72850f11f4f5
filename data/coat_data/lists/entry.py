"""``SourceEntry``: what every list is read into, in the words of a recipe's ``data`` entries."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coat_data.containers.remote_file import is_url
from coat_data.sample import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source and how much of it takes part."""

    name: str
    path: str
    """Absolute path, pattern or address."""
    media_root: str | None = None
    """Absolute folder; None for the folder of ``path``."""
    format: str | None = None
    """Name of a reader; None to find it by content."""
    select: str | None = None
    """``first 1000``, ``last 10%``, ``random 50%``; None for all rows."""
    seed: int | None = None
    """Seed of a random ``select``; None for the recipe's, or 0 without one."""
    repeat: float | None = None
    """Passes per epoch; None for 1."""
    weight: float | None = None
    """Share of an epoch relative to the other sources."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's names of fields -> those of the file."""
    ignored: tuple[str, ...] = ()
    """Keys of the list that mean nothing here; the user is told. Not for a recipe."""

    def settings(self) -> dict[str, Any]:
        """The entry as a recipe writes it: what is set, and nothing else."""
        settings = dataclasses.asdict(self)
        return {name: value for name, value in settings.items() if value not in (None, {}, ())}


def absolute(path: str, listing: Path) -> str:
    """``path`` relative to the folder of the list that names it; an address stays as it is."""
    if is_url(path):
        return path
    return str((listing.parent / Path(path).expanduser()).absolute())


def positive(value: object, name: str, where: str) -> float:
    """The value, or a DataError if it is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(where, f"{name} is {value!r}", "give a number above 0")
    return float(value)


def text(value: object, name: str, where: str) -> str:
    """The value, or a DataError if it is not a text."""
    if not isinstance(value, str) or not value:
        raise DataError(where, f"{name} is {value!r}", "give a text")
    return value
