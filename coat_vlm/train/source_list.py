"""A recipe's source that is a list of sources: one source for each entry, with its own share."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry
from coat_data.lists.read import read_list
from coat_data.sample import DataError
from coat_data.selection import listed_sources
from coat_vlm.config import SourceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source of a stage, as a recipe would have it."""

    config: SourceConfig
    columns: Mapping[str, str] = field(default_factory=dict)
    """The reader's names of fields -> those of the file."""


def parts(source: SourceConfig) -> list[Part]:
    """The sources that a source of a recipe stands for: itself, or those of the list it names.

    An entry is called ``source/entry`` (``source`` if it is the only one). What the recipe says
    holds for the entries that say nothing, and its ``repeat`` multiplies theirs. Its ``weight`` is
    shared out by the entries' weights; where they have none, every entry gets all of it here, and
    :func:`by_rows` shares it out. With ``select`` a list stays one source with the rows of all its
    entries, and so does a list in a list.

    Raises:
        DataError: the list has a mistake, or ``exclude`` names none of its sources.
        ValueError: ``repeat`` is asked of a list with weights, or only some entries have a weight.
    """
    entries = read_list(source.path) if source.select is None else None
    if entries is None:
        return [Part(config=source)]
    weights = [entry.weight for entry in entries if entry.weight is not None]
    if weights and len(weights) < len(entries):
        raise ValueError(
            f"{source.name}: only {len(weights)} of the {len(entries)} sources of {source.path} "
            "have a weight; give one to all or to none"
        )
    if weights and source.repeat is not None:
        raise ValueError(
            f"{source.name}: repeat={source.repeat} has no meaning with the weights of "
            f"{source.path}; give this source a weight instead, or remove it"
        )
    found = [_part(source, entry, sum(weights), alone=len(entries) == 1) for entry in entries]
    return found if source.exclude is None else _excluding(source, source.exclude, found)


def ignored_keys(sources: Sequence[SourceConfig]) -> list[str]:
    """A line for each entry of the sources' lists that has keys without a meaning here."""
    return [
        f"{source.name}/{entry.name}: {', '.join(entry.ignored)} of {source.path} has no meaning "
        "here and is passed over"
        for source in sources
        for entry in read_list(source.path) or []
        if entry.ignored
    ]


def ignored_weights(sources: Sequence[SourceConfig]) -> list[str]:
    """A line for each validation source that is a list with weights."""
    return [
        f"{source.name}: the weights of {source.path} play no part in validation, which reads "
        "every row once; if it is a metadataset, this is its split train, and "
        f"{source.path}#val is its split val"
        for source in sources
        if any(entry.weight is not None for entry in read_list(source.path) or [])
    ]


def by_rows(source: SourceConfig, entries: list[Part], rows: list[int]) -> list[Part]:
    """Share out the weight of a list whose entries have none, by what they are without it.

    Args:
        source: the list's.
        entries: its parts.
        rows: of each part.
    """
    listed = read_list(source.path) or []
    if source.weight is None or len(entries) == 1 or listed[0].weight is not None:
        return entries
    samples = [number * (entry.repeat or 1.0) for entry, number in zip(listed, rows, strict=True)]
    if not sum(samples):
        return entries  # the mixture says which source has no rows
    return [
        _changed(part, repeat=None, weight=source.weight * number / sum(samples))
        for part, number in zip(entries, samples, strict=True)
    ]


def _part(source: SourceConfig, entry: SourceEntry, weights: float, *, alone: bool) -> Part:
    """An entry with what the recipe says of its list; ``weights`` is the sum of all entries'."""
    weight, repeat = entry.weight, entry.repeat
    if source.weight is not None:
        weight, repeat = source.weight * (1.0 if weight is None else weight / weights), None
    elif source.repeat is not None:
        repeat = source.repeat * (repeat or 1.0)
    config = SourceConfig(
        name=source.name if alone else f"{source.name}/{entry.name}",
        path=entry.path,
        media_root=entry.media_root or source.media_root,
        format=entry.format or source.format,
        follow_links=source.follow_links,
        repeat=repeat,
        weight=weight,
        select=entry.select,
        seed=entry.seed,
        exclude=source.exclude,
    )
    return Part(config=config, columns=entry.columns)


def _excluding(source: SourceConfig, path: str, found: list[Part]) -> list[Part]:
    """The parts, without ``exclude`` where that file lists no row of theirs."""
    listed = listed_sources(Path(path))
    names = [part.config.name for part in found]
    if not listed & set(names):
        raise DataError(
            path,
            f"lists no row of {source.name!r}, which is {', '.join(names)}; only of "
            f"{sorted(listed) or 'none'}",
            "name the source as the run did that wrote the list, or remove exclude",
        )
    return [part if part.config.name in listed else _changed(part, exclude=None) for part in found]


def _changed(part: Part, **changes: Any) -> Part:
    return dataclasses.replace(part, config=dataclasses.replace(part.config, **changes))
