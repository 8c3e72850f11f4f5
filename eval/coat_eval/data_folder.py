"""The local files of one benchmark: its tables, found by their official names, and its media.

Images and videos (:class:`Shown`) are read only when their question is asked. Each kind has a
``name`` for messages and fingerprints, a ``kind`` (image or video), a ``place`` (things of one
place are cheap to read one after the other), and ``load``.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from coat_data.sample import DataError, Media, MediaKind
from coat_eval.files import Table, read_table

Layouts = Mapping[str, Sequence[Sequence[str]]]
"""By split, the layouts that are looked for in this order; each is the patterns of its tables,
relative to any folder. The first pattern has to be there."""

_TABLES = (".json", ".jsonl", ".gz", ".parquet")
_IDS = ("question_id", "questionId", "id", "image_id", "image", "video_id")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, which knows where its media are."""

    values: Mapping[str, Any]
    table: Table
    index: int
    folder: "DataFolder"

    @property
    def where(self) -> str:
        """File and row."""
        return self.table.where(self.index)

    @property
    def in_parquet(self) -> bool:
        """Whether the row is from a Parquet file, which holds the images."""
        return self.table.path.suffix == ".parquet"

    def image(
        self,
        name: str,
        folders: Sequence[str],
        suffixes: Sequence[str] = ("",),
        *,
        column: str = "image",
        pick: Literal["first", "middle"] = "first",
    ) -> "Shown":
        """The row's picture: in ``column`` of a Parquet file, else a file of its own.

        Arguments as of :meth:`DataFolder.file`; ``pick`` as in :class:`ShownCell`.
        """
        if self.in_parquet:
            return ShownCell(self.table.path, self.index, column, pick)
        return self.folder.file(name, folders, suffixes)


class DataFolder:
    """A benchmark's folder.

    Attributes:
        path: the folder.
        tables: its tables of one split.
    """

    def __init__(self, path: Path, tables: Sequence[Table]) -> None:
        self.path = path
        self.tables = list(tables)
        self._found: dict[tuple[str, ...], Path] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        name: str,
        layouts: Layouts,
        split: str = "",
        others: Collection[str] = (),
    ) -> "DataFolder":
        """Find and read the tables of a split; arguments and errors as of :func:`find_tables`.

        Raises:
            DataError: also if a table cannot be read or is there twice.
        """
        files = find_tables(path, name, layouts, split, others)
        tables = [read_table(file) for file in files]
        _refuse_copies(tables)
        return cls(path, tables)

    def rows(self, *fields: str) -> Iterator[Row]:
        """The rows of the tables that have all of these fields."""
        for table in self.tables:
            if table.has(*fields):
                for index, values in enumerate(table.rows):
                    yield Row(values, table, index, self)

    def file(
        self,
        name: str,
        folders: Sequence[str],
        suffixes: Sequence[str] = ("",),
        kind: MediaKind = "image",
    ) -> "Shown":
        """An image or video by name.

        Args:
            name: file name, with or without suffix.
            folders: where it may be, relative to the benchmark's folder; the first stands in the
                message when it is in none of them.
            suffixes: what may be added to the name.
            kind: what it is.
        """
        key = (*folders, *suffixes)
        known = self._found.get(key)
        places = [self.path / folder for folder in folders]
        for place in [known, *places] if known is not None else places:
            for suffix in suffixes:
                if (place / f"{name}{suffix}").is_file():
                    self._found[key] = place
                    return ShownFile(place / f"{name}{suffix}", kind)
        return ShownFile(places[0] / f"{name}{suffixes[0]}", kind)


def find_tables(
    path: Path, name: str, layouts: Layouts, split: str = "", others: Collection[str] = ()
) -> list[Path]:
    """The tables of a split, which are not opened.

    Args:
        path: the benchmark's folder.
        name: the benchmark, for messages.
        layouts: see :data:`Layouts`.
        split: one of the layouts' keys; the first when empty.
        others: names of folders that are not searched, such as those of other benchmarks.

    Raises:
        FileNotFoundError: the folder is not there.
        ValueError: the benchmark has no such split.
        DataError: the folder has none of the layouts.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder; put the files of {name} there, or fetch them with: "
            f"coat-vlm data download {name} --out {path.parent}"
        )
    split = split or next(iter(layouts))
    if split not in layouts:
        raise ValueError(f"{name} has no split {split!r}; allowed: {', '.join(layouts)}")
    files = list(_files(path, others))
    for patterns in layouts[split]:
        if any(_fits(file, path, patterns[0]) for file in files):
            chosen = [file for pattern in patterns for file in files if _fits(file, path, pattern)]
            return list(dict.fromkeys(chosen))
    wanted = "; or ".join(" with ".join(patterns) for patterns in layouts[split])
    raise no_questions(path, name, f"split {split}: looked for {wanted}")


def only_tables(path: Path) -> bool:
    """Whether a folder has tables and, hidden files aside, nothing else."""
    return all(one.is_file() and one.name.endswith(_TABLES) for one in path.glob("[!.]*"))


def no_questions(path: Path, name: str, problem: str) -> DataError:
    """The error of a folder without questions of a benchmark; ``problem`` says what was found."""
    out = path.parent if path.name == name else path
    return DataError(
        str(path),
        f"has no questions of {name}, {problem}",
        f"put them there (docs/evaluation.md lists the files), or fetch them with coat-vlm "
        f"data download {name} --out {out}",
    )


def _refuse_copies(tables: Sequence[Table]) -> None:
    """DataError if two tables have one name, gzip aside, and begin with the same question."""
    seen: dict[tuple[str, str], Path] = {}
    for table in filter(lambda one: one.rows, tables):
        row = table.rows[0]
        ids = {field: row[field] for field in _IDS if field in row} or row
        first = seen.setdefault((table.path.name.removesuffix(".gz"), str(ids)), table.path)
        if first != table.path:
            raise DataError(
                str(table.path), f"is the same table as {first}", "keep one of the two files"
            )


def _files(path: Path, others: Collection[str]) -> Iterator[Path]:
    """All tables below a folder, in the order of their names."""
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - set(others))
        for name in sorted(names):
            if name.endswith(_TABLES):
                yield Path(parent) / name


def _fits(file: Path, root: Path, pattern: str) -> bool:
    """Whether the end of a path below ``root`` is like the pattern."""
    parts = file.relative_to(root).parts[-len(pattern.split("/")) :]
    wanted = pattern.split("/")
    # A gzipped file is the same table.
    return len(parts) == len(wanted) and all(
        fnmatch(part, like) or fnmatch(part, f"{like}.gz")
        for part, like in zip(parts, wanted, strict=True)
    )


class Shown(Protocol):
    """An image or video that can be loaded."""

    @property
    def kind(self) -> MediaKind:
        """What the model sees it as."""
        ...

    @property
    def name(self) -> str:
        """File, and where it stands in it."""
        ...

    @property
    def place(self) -> str:
        """What is read together; empty for files of their own."""
        ...

    def load(self) -> Media:
        """The medium; DataError naming it if it cannot be had."""
        ...


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file of its own."""

    path: Path
    kind: MediaKind = "image"
    place: str = ""

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def load(self) -> Media:
        """The file itself, which is opened by whoever decodes it."""
        return Media(kind=self.kind, path=str(self.path))


@dataclass(frozen=True, slots=True)
class ShownFrame:
    """The middle frame of a video, as a picture.

    LLaVA and VILA show SEED-Bench's videos so (LLaVA scripts/extract_video_frames.py).
    """

    path: Path
    start: float | None = None
    """Seconds from the beginning at which the part in question starts."""
    end: float | None = None
    kind: MediaKind = "image"
    place: str = ""

    @property
    def name(self) -> str:
        """The path, and the seconds that the part lasts from and to."""
        part = "" if self.start is None else f"#t={self.start:g},{self.end:g}"
        return f"{self.path}{part}"

    def load(self) -> Media:
        """The decoded frame, stored without loss."""
        from coat_data.media.video import read_frames

        video = Media(kind="video", path=str(self.path), start=self.start, end=self.end)
        buffer = io.BytesIO()
        read_frames(video, 1)[0].save(buffer, "PNG", compress_level=0)
        return Media(kind="image", path=self.name, data=buffer.getvalue())


@dataclass(frozen=True, slots=True)
class ShownCell:
    """An image in a Parquet file: ``{"bytes", "path"}``, or one of a list of them."""

    path: Path
    row: int
    """Counted from 0 over the file."""
    column: str
    pick: Literal["first", "middle"] = "first"
    """Which of a list: the middle one stands for a video."""
    kind: MediaKind = "image"

    @property
    def name(self) -> str:
        """File, row (from 1) and column."""
        return f"{self.path}, row {self.row + 1}, {self.column}"

    @property
    def place(self) -> str:
        """File and row group, which can only be read whole."""
        group, _ = _group_of(str(self.path), self.row)
        return f"{self.path}#{group:06d}"

    def load(self) -> Media:
        """The encoded image.

        Raises:
            DataError: the cell is empty, or the file cannot be read.
        """
        group, place = _group_of(str(self.path), self.row)
        cell = _column(str(self.path), group, self.column)[place].as_py()
        if isinstance(cell, list):
            cell = (cell[len(cell) // 2 if self.pick == "middle" else 0]) if cell else None
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data:
            raise DataError(self.name, "holds no image", "download the file again")
        return Media(kind="image", path=self.name, data=data)


@lru_cache(maxsize=64)
def _starts(path: str) -> tuple[int, ...]:
    """First row of each row group, and the number of rows."""
    import pyarrow.parquet as pq

    starts = [0]
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    return tuple(starts)


def _group_of(path: str, row: int) -> tuple[int, int]:
    """Row group of a row, and its place in it."""
    starts = _starts(path)
    group = bisect_right(starts, row) - 1
    return group, row - starts[group]


@lru_cache(maxsize=2)
def _column(path: str, group: int, column: str) -> Any:
    """One column of a row group; the last two are kept, as neighbours are asked for in turn."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group, columns=[column]).column(0)
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read: {error}", "download it again") from error
