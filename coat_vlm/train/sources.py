"""Resolves a stage's data sources: expands lists, selects and excludes rows, shares out weights.

A recipe's source may be a list of sources. Each of its entries is then a source with its own share.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry
from coat_data.lists.read import read_list
from coat_data.load.dataset import SampleDataset
from coat_data.mixture.selection import (
    Rows,
    SelectedRows,
    listed_sources,
    read_quarantine,
    select_rows,
    without,
)
from coat_data.sample import DataError
from coat_vlm.config import Recipe, SourceConfig


def open_sources(
    sources: Sequence[SourceConfig], seed: int
) -> tuple[list[SourceConfig], list[Rows]]:
    """The training sources of a stage, those of lists one by one, and their rows that take part.

    An entry of a list is called ``source/entry`` (``source`` if it is the only one). What the
    recipe says holds for the entries that say nothing, and its ``repeat`` multiplies theirs. Its
    ``weight`` is shared out by the entries' weights, or, where they have none, by their samples.
    With ``select`` a list stays one source with the rows of all its entries, and so does a list in
    a list.

    Args:
        sources: of the recipe.
        seed: of random selections, where a source has none of its own.

    Raises:
        DataError: as :func:`open_source`, a list has a mistake, or ``exclude`` names none of its
            sources.
        ValueError: as :func:`open_source`, weights and repeats of a list contradict each other,
            only some entries have a weight, or two sources have one name.
    """
    configs: list[SourceConfig] = []
    datasets: list[Rows] = []
    for source in sources:
        entries = read_list(source.path) if source.select is None else None
        if entries is None:
            found, opened = [source], [open_source(source, seed)]
        else:
            found = _entry_configs(source, entries)
            opened = [
                open_source(config, seed, entry.columns)
                for config, entry in zip(found, entries, strict=True)
            ]
            found = _weighted_by_rows(source, entries, found, opened)
        configs += found
        datasets += opened
    names = Counter(config.name for config in configs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"several sources are called {', '.join(twice)}; give each source of the recipe and "
            "each entry of its lists a name of its own"
        )
    return configs, datasets


def _entry_configs(source: SourceConfig, entries: list[SourceEntry]) -> list[SourceConfig]:
    """The entries of a list as a recipe would have them.

    Where they have no weights, each gets all of the source's.
    """
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
    names = [
        source.name if len(entries) == 1 else f"{source.name}/{entry.name}" for entry in entries
    ]
    listed = set(names) if source.exclude is None else listed_sources(Path(source.exclude))
    if source.exclude is not None and not listed & set(names):
        raise DataError(
            source.exclude,
            f"lists no row of {source.name!r}, which is {', '.join(names)}; only of "
            f"{sorted(listed) or 'none'}",
            "name the source as the run did that wrote the list, or remove exclude",
        )
    configs = []
    for name, entry in zip(names, entries, strict=True):
        weight, repeat = entry.weight, entry.repeat
        if source.weight is not None:
            weight, repeat = (
                source.weight * (1.0 if weight is None else weight / sum(weights)),
                None,
            )
        elif source.repeat is not None:
            repeat = source.repeat * (repeat or 1.0)
        config = SourceConfig(
            name=name,
            path=entry.path,
            media_root=entry.media_root or source.media_root,
            format=entry.format or source.format,
            follow_links=source.follow_links,
            repeat=repeat,
            weight=weight,
            select=entry.select,
            seed=entry.seed,
            exclude=source.exclude if name in listed else None,
        )
        configs.append(config)
    return configs


def _weighted_by_rows(
    source: SourceConfig,
    entries: list[SourceEntry],
    configs: list[SourceConfig],
    datasets: Sequence[Rows],
) -> list[SourceConfig]:
    """Share out the weight of a list whose entries have none, by what they are without it."""
    if source.weight is None or len(entries) == 1 or entries[0].weight is not None:
        return configs
    samples = [
        len(rows) * (entry.repeat or 1.0) for entry, rows in zip(entries, datasets, strict=True)
    ]
    if not sum(samples):
        return configs  # the mixture says which source has no rows
    return [
        dataclasses.replace(config, repeat=None, weight=source.weight * number / sum(samples))
        for config, number in zip(configs, samples, strict=True)
    ]


def open_source(
    source: SourceConfig,
    seed: int,
    columns: Mapping[str, str] | None = None,
    *,
    without_weights: bool = False,
) -> Rows:
    """The rows of one source that take part; a list is read as one source.

    Args:
        source: what to open.
        seed: of a random selection, where the source has none of its own.
        columns: the reader's names of fields -> those of the file.
        without_weights: pass over the weights of a list, for reading every row once.

    Raises:
        DataError: the file or folder is missing or cannot be read, or the list of excluded rows is
            not one of this source.
        ValueError: there is no such format, no row is left, or there are fewer than are to be
            selected.
    """
    dataset = SampleDataset(
        source.path,
        source.media_root or None,
        source.name,
        format=source.format,
        follow_links=source.follow_links,
        columns=columns,
        without_weights=without_weights,
    )
    if source.select is None and source.exclude is None:
        return dataset
    size = len(dataset)
    rows = select_rows(
        size, source.select, seed if source.seed is None else source.seed, source.name
    )
    if source.exclude is not None:
        excluded = read_quarantine(Path(source.exclude), source.name, source.path, size)
        rows = without(rows, excluded)
    if not len(rows):
        raise ValueError(
            f"{source.name}: all of its selected rows are excluded by {source.exclude}; remove the "
            "source"
        )
    return SelectedRows(dataset, rows)


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


def texts(recipe: Recipe) -> Iterator[str]:
    """All text of the recipe's training sources, each once: what a tokenizer learns from."""
    seen: set[tuple[str | int | None, ...]] = set()
    for stage in recipe.stages.values():
        for source in stage.data:
            rows = (source.path, source.select, source.seed, source.exclude)
            if rows in seen:
                continue
            seen.add(rows)
            for dataset in open_sources([source], recipe.seed)[1]:
                for row in range(len(dataset)):
                    for turn in dataset[row].turns:
                        yield turn.text


_COMPARED = ("name", "select", "seed", "repeat", "weight")


class SourceRecord:
    """The sources of a stage, those of lists one by one, with their rows: what its order rests on.

    It is kept in ``sources.json`` in the stage's folder.

    Args:
        folder: the stage's.
        sources: the training sources.
        rows: of each source, those that take part.
    """

    def __init__(self, folder: Path, sources: Sequence[SourceConfig], rows: Sequence[int]) -> None:
        self._path = folder / "sources.json"
        self._found: list[dict[str, Any]] = [
            {**{key: getattr(source, key) for key in _COMPARED}, "rows": number}
            for source, number in zip(sources, rows, strict=True)
        ]

    def check(self) -> None:
        """Compare with what was saved; a run of before there was such a file passes.

        Raises:
            ValueError: a source was added, removed, moved or changed.
        """
        if not self._path.is_file():
            return
        saved: list[dict[str, Any]] = json.loads(self._path.read_text())
        if saved == self._found:
            return
        before, after = ({one["name"]: one for one in many} for many in (saved, self._found))
        details = [
            f"{name} is {'new' if name in after else 'gone'}"
            for name in [*before, *after]
            if (name in before) != (name in after)
        ]
        details += [
            f"{name} has {key} {after[name][key]!r}, had {one[key]!r}"
            for name, one in before.items()
            for key in one
            if name in after and after[name][key] != one[key]
        ]
        raise ValueError(
            f"the data differs from {self._path}, with which this run started: "
            f"{'; '.join(details) or 'its order'}; restore the lists and files of the sources, or "
            "start a new run in another output_dir"
        )

    def save(self) -> None:
        """Write the file whole; for one process."""
        temporary = self._path.with_suffix(".new.json")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(self._found, indent=1))
        temporary.replace(self._path)
