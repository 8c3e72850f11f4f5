"""Map-style data set over a source in any known format, or over a list of sources."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from coat_data.containers.open import open_rows
from coat_data.containers.remote_file import is_url
from coat_data.containers.rows import Rows, locate
from coat_data.limits import Limits, Network
from coat_data.lists import SourceEntry, read_list
from coat_data.media.remote_media import restrict_media
from coat_data.media.root import MediaRoot
from coat_data.mixture.selection import select_rows
from coat_data.readers import llava
from coat_data.readers.catalogue import find_reader, get_reader
from coat_data.readers.fields import check_columns, rename
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample

_SEED = 0  # seed of random selections without a seed, so that a list always selects the same rows


_ROWS_PROBED = 100
"""Rows in which a known format is searched; the first rows of a file may be broken."""


class SampleDataset:
    """The samples of a data file, a folder, a pattern of shards, or a list of these.

    Storage and format of the rows are detected by content; docs/guides/data.md lists them.
    Rows stay on disk, so that an instance is small and cheap to pickle.

    Attributes:
        media_root: absolute folder, or URL, that relative media paths start from; for a list
            the deepest folder above all sources' roots.
        paths: the files of the rows, and the list itself; a folder means all files below it.

    Args:
        in_order: open for a full read by :meth:`stream` only: also accept truncated files, and
            ignore a list's weights.
        without_weights: ignore a list's weights, which are otherwise an error.
    """

    def __init__(
        self,
        path: str | Path,
        media_root: str | Path | None = None,
        name: str | None = None,
        *,
        format: str | None = None,
        follow_links: bool = False,
        columns: Mapping[str, str] | None = None,
        ignore_fields: Iterable[str] = (),
        supervise: Literal["all", "last"] = "all",
        boxes: Literal["convert", "keep"] = "convert",
        field_map: Mapping[str, str] | None = None,
        network: Network = "allow",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        in_order: bool = False,
        without_weights: bool = False,
    ) -> None:
        without_weights = without_weights or in_order
        if media_root is not None and not (is_url(media_root) or Path(media_root).is_dir()):
            problem = "media_root is not a folder"
            raise DataError(str(media_root), problem, "give the folder of the media files")
        entries = read_list(path)
        if entries is not None and without_weights:
            entries = [dataclasses.replace(entry, weight=None) for entry in entries]
        self.path = str(path)
        self.name = Path(path).stem if name is None else name
        self.container = Rows()
        self._sources: list[SampleDataset] = []
        self._whole: list[bool] = []
        self._chosen: list[np.ndarray] = []
        self.paths: tuple[Path, ...]
        if entries is not None:
            self._sources = [
                SampleDataset(
                    entry.path,
                    entry.media_root or media_root,  # the user's, if the list has none
                    entry.name,
                    format=entry.format or format,
                    follow_links=follow_links,
                    columns=entry.columns or columns,
                    ignore_fields=(*entry.ignore_fields, *ignore_fields),
                    supervise=supervise if entry.supervise == "all" else entry.supervise,
                    boxes=boxes if entry.boxes == "convert" else entry.boxes,
                    field_map=entry.field_map,
                    network=network,
                    limits=limits,
                    in_order=in_order,
                    without_weights=without_weights,
                )
                for entry in entries
            ]
            listing = Path(str(path).partition("#")[0]).absolute()
            parts = [part for source in self._sources for part in source.paths]
            self.paths = tuple(dict.fromkeys([listing, *parts] if listing.is_file() else parts))
            self._concatenate(entries)
        else:
            self.container = open_rows(
                str(path) if is_url(path) else Path(path).absolute(), limits=limits, network=network
            )
            self.paths = self.container.paths
            self._columns = dict(columns or {})
            check_columns(self._columns)
            self._field_map = dict(field_map or {})
            self._ignore = frozenset(ignore_fields)
            self._only_last = supervise == "last"
            self._keep_boxes = boxes == "keep"
            root = media_root or self.container.media_root
            self._root = MediaRoot(
                root if is_url(root) else Path(root).absolute(), follow_links=follow_links
            )
            self.media_root = self._root.folder
            self._network: Network = network
            self._limits = limits
            if format is None:
                probed = map(self._renamed, islice(self.container.stream(), _ROWS_PROBED))
                self.format = (find_reader(probed, str(path)) or llava.READER).name
            else:
                self.format = get_reader(format).name
        if self.container.damage is not None and not in_order:
            raise self.container.damage

    def _concatenate(self, entries: Sequence[SourceEntry]) -> None:
        self.format = "+".join(dict.fromkeys(source.format for source in self._sources))
        self.media_root = _common_root([source.media_root for source in self._sources])
        self._whole = [entry.select is None and entry.repeat is None for entry in entries]
        self._chosen = [
            _rows(entry, len(source)) for entry, source in zip(entries, self._sources, strict=True)
        ]
        self._ends = np.cumsum([len(rows) for rows in self._chosen], dtype=np.int64)
        for entry in entries:
            if entry.weight is not None:
                raise ValueError(
                    f"{entry.name}: weight has no effect when a list is read as one source (in "
                    "another list, or with select); give its sources to a recipe's data, or "
                    "ingest them first"
                )

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._sources else len(self.container)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample in row ``index`` (0 to ``len - 1``); DataError for a bad row."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)} rows")
        if not self._sources:
            return self._sample(self.container[int(index)], int(index))
        number, own = locate(self._ends, int(index))
        return self._sources[number][int(self._chosen[number][own])]

    def _sample(self, row: object, index: int) -> Sample:
        source, number = self.container.place(index)
        place = Place(
            source=source,
            row=number,
            root=self._root,
            columns=self._field_map,
            ignore=self._ignore,
            keep_boxes=self._keep_boxes,
        )
        if self._columns:
            row = rename(row, self._columns, place.where)
        sample = get_reader(self.format).read(row, place)
        if self._only_last:
            sample = sample.only_last_supervised()
        return restrict_media(sample, self._network, self._limits, self.media_root)

    def _renamed(self, row: object) -> object:
        try:
            return rename(row, self._columns, self.name) if self._columns else row
        except DataError as error:
            return error

    def stream(self) -> Iterator[Sample | DataError]:
        """Yield all samples in order, and a DataError for each bad row and for a truncated end."""
        yield from self.read_range(range(len(self)))

    def read_range(self, rows: range) -> Iterator[Sample | DataError]:
        """Yield what :meth:`stream` yields for consecutive rows."""
        if not self._sources:
            yield from self._convert(self.container.read_range(rows))
            if rows.stop == len(self) and self.container.damage is not None:
                yield self.container.damage
        start = 0
        for source, chosen, whole in zip(self._sources, self._chosen, self._whole, strict=True):
            own = range(max(rows.start - start, 0), min(rows.stop - start, len(chosen)))
            # A source without rows may be a damaged file; it belongs to the range that ends there.
            empty = not len(chosen) and (
                rows.start < start <= rows.stop or start == rows.start == 0
            )
            if own or empty:
                yield from (
                    source.read_range(own)
                    if whole
                    else source._read_each(chosen[own.start : own.stop])
                )
            start += len(chosen)

    def _read_each(self, rows: np.ndarray) -> Iterator[Sample | DataError]:
        for row in rows:
            try:
                yield self[int(row)]
            except DataError as error:
                yield error

    def _convert(self, rows: Iterable[tuple[int, object]]) -> Iterator[Sample | DataError]:
        for index, row in rows:
            try:
                yield row if isinstance(row, DataError) else self._sample(row, index)
            except DataError as error:
                yield error

    def sources(self) -> "Sequence[SampleDataset]":
        """Return the sources of a list, each with all rows; otherwise only this dataset."""
        return self._sources or [self]


def _common_root(given: Sequence[Path | str]) -> Path | str:
    """Return the deepest folder that contains all roots except URLs, with links resolved."""
    roots = [root for root in given if isinstance(root, Path)]
    if not roots:
        return given[0]
    common = os.path.commonpath(roots)
    real = os.path.realpath(common)
    if any(os.path.commonpath([os.path.realpath(root), real]) != real for root in roots):
        return Path(Path(common).anchor)  # a source's folder is a link to elsewhere
    return Path(common)


def _rows(entry: SourceEntry, size: int) -> np.ndarray:
    """Return the rows that an entry selects: int64, repeats one after the other."""
    rows = select_rows(size, entry.select, _SEED, entry.name)
    copies, rest = divmod(entry.repeat or 1.0, 1.0)
    part = round(rest * len(rows))
    if not copies and not part:
        raise ValueError(
            f"{entry.name}: repeat={entry.repeat} of {len(rows)} rows selects no row; raise "
            "repeat, or remove the source"
        )
    return np.concatenate([np.tile(rows, int(copies)), rows[:part]])
