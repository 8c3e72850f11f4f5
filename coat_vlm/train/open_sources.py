"""Opens a stage's data sources: expands lists, selects and excludes rows, distributes weights.

A source of a recipe may be a list of sources; each entry then becomes a source with its own share.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import numpy as np

from coat_data.limits import Limits, Network
from coat_data.lists import SourceEntry, read_list
from coat_data.load.dataset import SampleDataset
from coat_data.mixture.sampler import Mixture
from coat_data.mixture.selection import (
    Rows,
    SelectedRows,
    lists_rows_of,
    read_bad_samples,
    read_excluded_rows,
    select_rows,
)
from coat_data.sample import DataError, UnreachableError
from coat_data.tools.field_counts import FieldCounts
from coat_vlm.config import Recipe, SourceConfig

FIRST_ROWS = 16
"""Rows of each source that are read when a stage starts, for warnings and an example."""


class Access(TypedDict):
    """Network and limits of a recipe's sources, as arguments of ``SampleDataset``."""

    network: Network
    limits: Limits


def access_of(recipe: Recipe) -> Access:
    """Return whether a recipe's sources and rows may be at URLs, and their limits."""
    limits = {
        name: value
        for name, value in dataclasses.asdict(recipe.limits).items()
        if value is not None
    }
    return {"network": recipe.network, "limits": Limits(**limits)}


def open_sources(
    sources: Sequence[SourceConfig], seed: int, access: Access | None = None
) -> tuple[list[SourceConfig], list[Rows]]:
    """Open the training sources of a stage; return expanded sources and their selected rows.

    An entry of a list is named ``source/entry`` (``source`` if there is only one entry). Settings
    of the recipe's source are the defaults of the entries, and its ``repeat`` multiplies theirs.
    Its ``weight`` is distributed in proportion to the entries' weights or numbers of samples. With
    ``select``, and in another list, a list stays one source.

    Raises what :func:`open_source` raises; also for mistakes in a list, contradicting weights and
    equal names.
    """
    configs: list[SourceConfig] = []
    datasets: list[Rows] = []
    for source in sources:
        entries = read_list(source.path) if source.select is None else None
        if entries is None:
            expanded, opened = [source], [open_source(source, seed, access=access)]
        else:
            expanded = _expand_entries(source, entries)
            opened = [
                open_source(config, seed, entry.field_map, access=access)
                for config, entry in zip(expanded, entries, strict=True)
            ]
            expanded = _distribute_weight(source, entries, expanded, opened)
        configs += expanded
        datasets += opened
    check_names(configs)
    return configs, datasets


def check_names(sources: Sequence[SourceConfig]) -> None:
    """Raise ValueError if two of the sources of a stage have the same name."""
    names = Counter(source.name for source in sources)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"several sources are named {', '.join(twice)}; the names of all sources of the recipe "
            "and of all entries of their lists must differ"
        )


def mix_sources(sources: Sequence[SourceConfig], datasets: Sequence[Rows], seed: int) -> Mixture:
    """Build the mixture of a stage's expanded sources; ValueError if it cannot be."""
    return Mixture(
        [len(rows) for rows in datasets],
        [source.repeat for source in sources],
        [source.weight for source in sources],
        seed,
        names=[source.name for source in sources],
    )


def _expand_entries(source: SourceConfig, entries: list[SourceEntry]) -> list[SourceConfig]:
    """Convert the entries of a list to sources; entries without weights get the source's."""
    weights = [entry.weight for entry in entries if entry.weight is not None]
    if weights and len(weights) < len(entries):
        raise ValueError(
            f"{source.name}: only {len(weights)} of the {len(entries)} sources of {source.path} "
            "have a weight; set the weights of all or of none"
        )
    if weights and source.repeat is not None:
        raise ValueError(
            f"{source.name}: repeat={source.repeat} has no effect with the weights of "
            f"{source.path}; set a weight of this source instead, or remove it"
        )
    names = [
        source.name if len(entries) == 1 else f"{source.name}/{entry.name}" for entry in entries
    ]
    listed = {} if source.exclude is None else read_bad_samples(Path(source.exclude))
    excludes = [
        lists_rows_of(listed, name, entry.path) for name, entry in zip(names, entries, strict=True)
    ]
    if source.exclude is not None and not any(excludes):
        raise DataError(
            source.exclude,
            f"contains no rows of {source.name!r} (sources {', '.join(names)}), only of "
            f"{sorted(name or 'the files that it names' for name in listed) or 'none'}",
            "use the source name of the run that wrote the file, or remove exclude",
        )
    configs = []
    for name, entry, has_rows in zip(names, entries, excludes, strict=True):
        weight, repeat = entry.weight, entry.repeat
        if source.weight is not None:
            weight = source.weight * (1.0 if weight is None else weight / sum(weights))
            repeat = None
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
            exclude=source.exclude if has_rows else None,
            columns=dict(entry.columns or source.columns),
            ignore_fields=[*source.ignore_fields, *entry.ignore_fields],
            supervise=source.supervise if entry.supervise == "all" else entry.supervise,
            boxes=source.boxes if entry.boxes == "convert" else entry.boxes,
        )
        configs.append(config)
    return configs


def _distribute_weight(
    source: SourceConfig,
    entries: list[SourceEntry],
    configs: list[SourceConfig],
    datasets: Sequence[Rows],
) -> list[SourceConfig]:
    if source.weight is None or len(entries) == 1 or entries[0].weight is not None:
        return configs
    samples = [
        len(rows) * (entry.repeat or 1.0) for entry, rows in zip(entries, datasets, strict=True)
    ]
    if not sum(samples):
        return configs  # the mixture raises an error that names the source without rows
    return [
        dataclasses.replace(config, repeat=None, weight=source.weight * number / sum(samples))
        for config, number in zip(configs, samples, strict=True)
    ]


def open_source(
    source: SourceConfig,
    seed: int,
    field_map: Mapping[str, str] | None = None,
    *,
    access: Access | None = None,
    without_weights: bool = False,
) -> Rows:
    """Open the selected rows of one source; a list is read as one source.

    ``field_map``: the reader's field names -> the file's column names (LlamaFactory).
    ``without_weights`` ignores the weights of a list, to read every row once. Raises DataError if
    the source cannot be read, ValueError if ``format``, ``select`` or ``exclude`` do not fit.
    """
    dataset = SampleDataset(
        source.path,
        source.media_root or None,
        source.name,
        format=source.format,
        follow_links=source.follow_links,
        columns=source.columns,
        ignore_fields=source.ignore_fields,
        supervise=source.supervise,
        boxes=source.boxes,
        field_map=field_map,
        without_weights=without_weights,
        **(access or Access(network="allow", limits=Limits())),
    )
    if source.select is None and source.exclude is None:
        return dataset
    size = len(dataset)
    rows = select_rows(size, source.select, seed, source.name)
    if source.exclude is not None:
        excluded = read_excluded_rows(Path(source.exclude), source.name, source.path, size)
        rows = rows[~np.isin(rows, sorted(excluded))]
    if not len(rows):
        raise ValueError(
            f"{source.name}: {source.exclude} excludes all selected rows; remove the source"
        )
    return SelectedRows(dataset, rows)


def find_row_warnings(sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> list[str]:
    """Return what readers noted in the first rows of each source, such as a quoted ``<image>``.

    The counts of all rows of a step are ``data_notes`` of metrics.jsonl.
    """
    warnings: list[str] = []
    for source, dataset in zip(sources, datasets, strict=True):
        counts = FieldCounts()
        for row in range(min(FIRST_ROWS, len(dataset))):
            with suppress(DataError):  # counted when training reads it
                counts.add(dataset[row])
        warnings += counts.warnings(source.name)
    return warnings


def iterate_texts(recipe: Recipe) -> Iterator[str]:
    """Yield all texts of the recipe's training sources, each source once, to train a tokenizer.

    DataError for a bad row, unless the stage allows some: then training counts it when it reads it.
    """
    seen: set[tuple[str | None, ...]] = set()
    for stage in recipe.stages.values():
        for source in stage.data:
            rows = (source.path, source.select, source.exclude)
            if rows in seen:
                continue
            seen.add(rows)
            for dataset in open_sources([source], recipe.seed, access_of(recipe))[1]:
                for row in range(len(dataset)):
                    try:
                        sample = dataset[row]
                    except DataError as error:
                        if not stage.max_bad_samples or isinstance(error, UnreachableError):
                            raise
                        continue
                    for turn in sample.turns:
                        yield turn.text
                    if sample.rejected:
                        yield sample.rejected
