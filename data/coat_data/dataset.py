"""Map-style access to the samples of a source in any of the known formats."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from coat_data.concatenation import Concatenation
from coat_data.containers.open import open_rows
from coat_data.containers.remote import RemoteRows
from coat_data.containers.remote_file import is_url
from coat_data.lists.read import list_file, read_list
from coat_data.media_root import MediaRoot
from coat_data.readers import llava
from coat_data.readers.catalogue import find_reader, reader_named
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample
from coat_data.stream_order import Shards

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
        path: the file or folder, an address of shards (:mod:`coat_data.containers.remote`), or a
            list of sources (:mod:`coat_data.lists.read`).
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
        self._rows: _OneSource | Concatenation
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
            self._rows = Concatenation(entries, self._sources)
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
        self.format = self._rows.format
        self.media_root = self._rows.media_root
        self.random_access = self._rows.random_access
        if not in_order:
            self._check_access(path)

    def _check_access(self, path: str | Path) -> None:
        if self._rows.damage is not None:
            raise self._rows.damage
        if not self._rows.random_access:
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
        raw = self._remote()
        return None if raw is None else raw.shards

    @property
    def replayed(self) -> int:
        """Rows that this process read over, as their server cannot be asked for others alone."""
        raw = self._remote()
        return 0 if raw is None else raw.replayed

    @property
    def unseekable(self) -> str | None:
        """The address that can only be read from its beginning, if there is one."""
        raw = self._remote()
        return None if raw is None else raw.unseekable

    def _remote(self) -> RemoteRows | None:
        raw = self._rows.raw if isinstance(self._rows, _OneSource) else None
        return raw if isinstance(raw, RemoteRows) else None

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
            self.format = (find_reader(probed, str(path)) or llava).NAME
        else:
            self.format = reader_named(format_name).NAME
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
