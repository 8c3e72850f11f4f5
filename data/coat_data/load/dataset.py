"""Map-style access to the samples of a source in any of the known formats, or of a list of them."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from coat_data.containers.open import open_rows
from coat_data.containers.remote_file import is_url
from coat_data.containers.rows import Rows, Shards, locate
from coat_data.lists.entry import SourceEntry
from coat_data.lists.read import list_file, read_list
from coat_data.media.root import MediaRoot
from coat_data.mixture.selection import select_rows
from coat_data.readers import llava
from coat_data.readers.catalogue import find_reader, reader_named
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample

_SEED = 0
"""Of ``random`` selections without a seed: a list names the same rows whenever it is opened."""


_ROWS_PROBED = 100
"""Rows in which a known kind is looked for; the first ones of a file may be broken."""


class SampleDataset:
    """The samples of a data file, a folder, a pattern of shards, or a list of these.

    How rows are stored and what they hold is found out by content; ``data/README.md`` lists the
    formats. Rows stay on disk, so that an instance is small and cheap to send to worker processes.

    Attributes:
        name: name in messages and tables; the file's or folder's name by default.
        format: what the rows were read as; of a list, the formats of its sources.
        media_root: absolute folder, or address, that relative media paths start from.
        random_access: whether samples can be taken by number.
        paths: the files that the rows are from, of a list also the list itself; a folder stands
            for all files below it. Media that rows name by path are not among them.

    Args:
        path: the file or folder, an address of shards (:mod:`coat_data.containers.remote_shards`),
            or a list of sources (:mod:`coat_data.lists.read`).
        media_root: folder or address; defaults to the file's folder, or to what the manifest or
            list says.
        name: see above.
        format: name of a reader, where the content does not tell.
        allow_pickle: read .pkl files, through an unpickler that builds plain values only.
        follow_links: allow links below the media root that lead out of it.
        columns: the reader's names of fields -> those of the file.
        in_order: for a full read by :meth:`stream` only: also what cannot be read by number, and
            what breaks off; without a list's weights.
        without_weights: pass over a list's weights, which are shares of an epoch, for reading every
            row once; otherwise they are an error.

    Raises:
        DataError: ``path`` or ``media_root`` does not exist, the file does not parse, its rows are
            of no known kind, or it can only be read in order.
        ValueError: there is no such format.
    """

    def __init__(
        self,
        path: str | Path,
        media_root: str | Path | None = None,
        name: str | None = None,
        *,
        format: str | None = None,
        allow_pickle: bool = False,
        follow_links: bool = False,
        columns: Mapping[str, str] | None = None,
        in_order: bool = False,
        without_weights: bool = False,
    ) -> None:
        without_weights = without_weights or in_order
        if media_root is not None and not (is_url(media_root) or Path(media_root).is_dir()):
            raise DataError(
                str(media_root), "media_root is not a folder", "give the folder of the media files"
            )
        entries = read_list(path)
        if entries is not None and without_weights:
            entries = [dataclasses.replace(entry, weight=None) for entry in entries]
        self.name = Path(path).stem if name is None else name
        self._rows: _OneSource | _Concatenation
        self._raw = Rows()
        self._sources: list[SampleDataset] = []
        self.paths: tuple[Path, ...]
        if entries is not None:
            self._sources = [
                SampleDataset(
                    entry.path,
                    entry.media_root or media_root,  # the user's holds where the list names none
                    entry.name,
                    format=entry.format,
                    allow_pickle=allow_pickle,
                    follow_links=follow_links,
                    columns=entry.columns,
                    in_order=in_order,
                    without_weights=without_weights,
                )
                for entry in entries
            ]
            self._rows = _Concatenation(entries, self._sources)
            listing = list_file(path)
            parts = [part for source in self._sources for part in source.paths]
            paths = parts if listing is None else [listing, *parts]
            self.paths = tuple(dict.fromkeys(paths))
        else:
            self._rows = _OneSource(
                str(path) if is_url(path) else Path(path).absolute(),
                media_root,
                format,
                allow_pickle,
                follow_links,
                columns,
            )
            self.paths = self._rows.paths
            self._raw = self._rows.raw
        self.format = self._rows.format
        self.media_root = self._rows.media_root
        self.random_access = self._rows.random_access
        if in_order:
            return
        if self._rows.damage is not None:
            raise self._rows.damage
        if not self.random_access:
            raise DataError(
                str(path),
                "can only be read in order (a pickle or a compressed tar), not by number",
                f"run: coat-vlm data ingest {path} --embed-media --out FOLDER, and train on FOLDER",
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """The sample in row ``index`` (0 to ``len - 1``).

        Raises:
            DataError: the row is bad; names the file and the row.
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)} rows")
        return self._rows.sample(int(index))

    def stream(self) -> Iterator[Sample | DataError]:
        """All samples in order; in the place of a bad row, what is wrong with it.

        Reads with bounded memory, and ends with the reason where a file breaks off.
        """
        return self._rows.stream()

    @property
    def shards(self) -> Shards | None:
        """How the rows lie in shards read over a network; None for a list, and on this machine."""
        return self._raw.shards

    @property
    def replayed(self) -> int:
        """Rows that this process read over, as their server cannot be asked for others alone."""
        return self._raw.replayed

    @property
    def unseekable(self) -> str | None:
        """The address that can only be read from its beginning, if there is one."""
        return self._raw.unseekable

    def sources(self) -> "Sequence[SampleDataset]":
        """The sources of a list, each as a whole; else this dataset alone."""
        return self._sources or [self]


class _OneSource:
    """Rows and the reader that understands them."""

    def __init__(
        self,
        path: Path | str,
        media_root: str | Path | None,
        format_name: str | None,
        allow_pickle: bool,
        follow_links: bool,
        columns: Mapping[str, str] | None,
    ) -> None:
        opened = open_rows(path, allow_pickle=allow_pickle)
        self.raw = opened.rows
        self.paths = opened.paths
        self._columns = {**opened.columns, **(columns or {})}
        root = media_root or opened.rows.media_root
        self._root = MediaRoot(
            root if is_url(root) else Path(root).absolute(), follow_links=follow_links
        )
        if format_name is None:
            probed = islice(opened.rows.stream(), _ROWS_PROBED)
            self.format = (find_reader(probed, str(path)) or llava.READER).name
        else:
            self.format = reader_named(format_name).name
        self.media_root = self._root.folder
        self.random_access = opened.rows.random_access
        self.damage = opened.rows.damage

    def __len__(self) -> int:
        return len(self.raw)

    def sample(self, index: int) -> Sample:
        return self._sample(self.raw[index], index)

    def stream(self) -> Iterator[Sample | DataError]:
        for index, row in enumerate(self.raw.stream()):
            if isinstance(row, DataError):
                yield row
                continue
            try:
                yield self._sample(row, index)
            except DataError as error:
                yield error
        if self.damage is not None:
            yield self.damage

    def _sample(self, row: object, index: int) -> Sample:
        source, number = self.raw.place(index)
        place = Place(source=source, row=number, root=self._root, columns=self._columns)
        return reader_named(self.format).to_sample(row, place)


class _Concatenation:
    """The samples of a list of sources.

    Attributes:
        format: the formats of the sources.
        media_root: the deepest folder above those of all sources, for relative paths in an
            ingested folder.
        random_access: whether all sources can be read by number.

    Args:
        entries: the list.
        parts: its sources, opened.

    Raises:
        ValueError: an entry selects nothing, or more than there is; or has a weight.
    """

    damage: DataError | None = None

    def __init__(self, entries: Sequence[SourceEntry], parts: "Sequence[SampleDataset]") -> None:
        self._parts = list(parts)
        self.format = "+".join(dict.fromkeys(part.format for part in parts))
        self.media_root = _common_root([part.media_root for part in parts])
        self.random_access = all(part.random_access for part in parts)
        self._whole = [_is_whole(entry) for entry in entries]
        self._chosen = [
            _rows(entry, len(part)) if part.random_access else np.zeros(0, dtype=np.int64)
            for entry, part in zip(entries, parts, strict=True)
        ]
        self._ends = np.cumsum([len(rows) for rows in self._chosen], dtype=np.int64)
        for entry, part in zip(entries, parts, strict=True):
            if entry.weight is not None or not (part.random_access or _is_whole(entry)):
                what = "weight" if entry.weight is not None else "select and repeat"
                raise ValueError(
                    f"{entry.name}: {what} has no meaning when a list is read as one source: "
                    "in another list, or with a select; give its sources to a recipe's data, or "
                    "ingest them first"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, index: int) -> Sample:
        """The sample at ``index``, in the order of the list."""
        number, own = locate(self._ends, index)
        return self._parts[number][int(self._chosen[number][own])]

    def stream(self) -> Iterator[Sample | DataError]:
        """All samples in order, errors in the place of bad ones."""
        for part, rows, whole in zip(self._parts, self._chosen, self._whole, strict=True):
            if whole:
                yield from part.stream()
                continue
            for row in rows:
                try:
                    yield part[int(row)]
                except DataError as error:
                    yield error


def _common_root(given: Sequence[Path | str]) -> Path | str:
    """The deepest folder that holds all roots, also where links among them lead.

    Addresses are no part of it: what lies below one is stored with its whole address.
    """
    roots = [root for root in given if isinstance(root, Path)]
    if not roots:
        return given[0]
    common = os.path.commonpath(roots)
    real = os.path.realpath(common)
    if any(os.path.commonpath([os.path.realpath(root), real]) != real for root in roots):
        return Path(Path(common).anchor)  # a source's folder is a link to elsewhere
    return Path(common)


def _is_whole(entry: SourceEntry) -> bool:
    return entry.select is None and entry.repeat is None


def _rows(entry: SourceEntry, size: int) -> np.ndarray:
    """The rows that an entry asks for: int64, repeats one after the other."""
    rows = select_rows(size, entry.select, entry.seed or _SEED, entry.name)
    copies, rest = divmod(entry.repeat or 1.0, 1.0)
    part = round(rest * len(rows))
    if not copies and not part:
        raise ValueError(
            f"{entry.name}: repeat={entry.repeat} of {len(rows)} rows is no row; raise repeat, or "
            "remove the source"
        )
    return np.concatenate([np.tile(rows, int(copies)), rows[:part]])
