"""Limits on the resources that data sets written by third parties may use.

Every limit is a recipe key (``limits.NAME``, ``network``) and an option of the data commands
(``--limits NAME=NUMBER``, ``--network``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Network = Literal["allow", "deny"]
"""Whether sources, media roots and rows may be at URLs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of compressed files and of media at URLs."""

    archive_bytes: int | None = None
    """Bytes that a compressed file may be unpacked to; default 250 times its size, and at least
    1 GiB."""
    remote_bytes: int = 2 << 30
    """Bytes of an image or video over http, which is held in memory."""
    remote_s: float = 300.0
    """Seconds for an image or video over http."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"limits.{field.name}={value}; give a number above 0")

    @classmethod
    def parse(cls, settings: Sequence[str]) -> "Limits":
        """Return the limits of ``NAME=NUMBER`` settings; ValueError for other names and values."""
        kinds = {field.name: float if field.name.endswith("_s") else int for field in fields(cls)}
        values = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in kinds:
                raise ValueError(f"--limits {setting}: choose NAME=NUMBER from {', '.join(kinds)}")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                kind = "a number" if kinds[name] is float else "a whole number"
                raise ValueError(f"--limits {setting}: {value!r} is not {kind}") from None
        return cls(**values)
