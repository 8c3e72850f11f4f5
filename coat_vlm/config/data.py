"""One data source of a stage's mixture: a recipe's ``data`` and ``val_data`` entries."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class SourceConfig:
    """One data source of a mixture."""

    name: str
    """Name in logs, tables and validation losses."""
    path: str
    """Data file, folder, pattern or address of shards, or list of sources; see data/README.md."""
    media_root: str | None = None
    """Folder or address that relative media paths start from; defaults to ``path``'s folder."""
    format: str | None = None
    """How to read a row, by a name that ``coat-vlm data lint`` shows; by content when absent."""
    follow_links: bool = False
    """Allow links below the media root that lead out of it."""
    repeat: Annotated[float, Field(gt=0.0)] | None = None
    """Passes over this source per epoch (default 1); fractions allowed. Exclusive with weight."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the samples of an epoch, relative to the other sources' weights."""
    select: Annotated[str, Field(pattern=r"^(first|last|random) \d+(\.\d+)?%?$")] | None = None
    """Rows that take part: ``first 1000``, ``last 5%``, ``random 10%``; all when absent. ``repeat``
    and ``weight`` are about these."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of a random ``select``; the recipe's when absent."""
    exclude: str | None = None
    """A ``bad_samples.jsonl`` of an earlier run, whose rows of this source are left out."""

    def __post_init__(self) -> None:
        if self.seed is not None and not (self.select or "").startswith("random"):
            raise ValueError(
                f"source {self.name!r}: seed={self.seed} has no effect without select: random ...; "
                "remove one of them"
            )
        if self.repeat is not None and self.weight is not None:
            raise ValueError(
                f"source {self.name!r}: both repeat={self.repeat} and weight={self.weight} are "
                "set; keep repeat (passes per epoch) or weight (share of an epoch)"
            )
