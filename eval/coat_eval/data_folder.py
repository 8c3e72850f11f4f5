"""The local files of a benchmark: tables, found by their official names, and media."""

import base64
import csv
import gzip
import io
import os
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from coat_data.sample import DataError, Media, MediaKind
from coat_eval.files import IMAGE_COLUMN, IMAGE_HASH, Table, Tables, read_table

Layouts = Mapping[str, Sequence[Sequence[str]]]
"""Layouts by split, in the order of the search: patterns of tables, of which the first must match a
file in any folder."""

TABLES = (".json", ".jsonl", ".csv", ".tsv", ".gz", ".parquet")
_IDS = ("question_id", "questionId", "id", "image_id", "image", "video_id", "question")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, with access to its media."""

    values: Mapping[str, Any]
    table: Table
    index: int
    folder: "DataFolder"

    @property
    def where(self) -> str:
        """File and row of this row."""
        return self.table.where(self.index)

    @property
    def in_parquet(self) -> bool:
        """Whether the row is from a Parquet file, which contains the images."""
        return self.table.path.suffix == ".parquet"

    def image(
        self,
        name: str,
        folders: Sequence[str],
        suffixes: Sequence[str] = ("",),
        *,
        column: str = "image",
        pick: Literal["first", "middle"] = "first",
    ) -> "MediaFile":
        """Return the row's image: in Parquet, in a TSV file of VLMEvalKit, or a file."""
        if self.in_parquet:
            return ParquetImage(self.table.path, row=self.index, column=column, pick=pick)
        if cell := self.values.get(IMAGE_COLUMN) if ".tsv" in self.table.path.suffixes else "":
            own = cell.startswith(IMAGE_HASH)
            rows = {} if own else self.folder.index(self.table, "index")
            if not own and cell not in rows:
                problem = f"has no row with index {cell!r}"
                raise DataError(str(self.table.path), problem, "download it again")
            return TableImage(self.table.path, row=self.index if own else rows[cell])
        return self.folder.file(name, folders, suffixes)


class DataFolder:
    """A benchmark's folder, with the tables of one split."""

    def __init__(self, path: Path, tables: Tables) -> None:
        self.path = path
        self.tables = list(tables)
        self._found: dict[tuple[str, ...], Path] = {}
        self._rows: dict[tuple[Path, str], dict[str, int]] = {}

    @classmethod
    def open(
        cls, path: Path, name: str, layouts: Layouts, split: str = "", others: Collection[str] = ()
    ) -> "DataFolder":
        """Read the tables of :func:`find_tables`; DataError if one is broken or exists twice."""
        files = find_tables(path, name, layouts, split, others)
        tables = [read_table(file) for file in files]
        # By name (without .gz) and first question.
        seen: dict[tuple[str, str], Path] = {}
        for table in filter(lambda one: one.rows, tables):
            row = table.rows[0]
            ids = {field: row[field] for field in _IDS if field in row} or row
            first = seen.setdefault((table.path.name.removesuffix(".gz"), str(ids)), table.path)
            if first != table.path:
                problem = f"is the same table as {first}"
                raise DataError(str(table.path), problem, "keep one of the two files")
        return cls(path, tables)

    def rows(self, *fields: str) -> Iterator[Row]:
        """Yield the rows of the tables that have all of these fields."""
        for table in self.tables:
            if table.has(*fields):
                yield from self.rows_of(table)

    def rows_of(self, table: Table) -> Iterator[Row]:
        """Yield the rows of one table."""
        for index, values in enumerate(table.rows):
            yield Row(values, table, index, self)

    def index(self, table: Table, column: str) -> Mapping[str, int]:
        """Return the indices of a table's rows by the text of a column."""
        key = (table.path, column)
        if key not in self._rows:
            self._rows[key] = {str(row.get(column)): i for i, row in enumerate(table.rows)}
        return self._rows[key]

    def file(
        self,
        name: str,
        folders: Sequence[str],
        suffixes: Sequence[str] = ("",),
        kind: MediaKind = "image",
    ) -> "MediaFile":
        """Find an image or video by name in the folders, which are relative to :attr:`path`."""
        key = (*folders, *suffixes)
        parents = [self.path / folder for folder in folders]
        for parent in [*([self._found[key]] if key in self._found else []), *parents]:
            for suffix in suffixes:
                if (parent / f"{name}{suffix}").is_file():
                    self._found[key] = parent
                    return MediaFile(parent / f"{name}{suffix}", kind)
        return MediaFile(parents[0] / f"{name}{suffixes[0]}", kind)


def find_tables(
    path: Path, name: str, layouts: Layouts, split: str = "", others: Collection[str] = ()
) -> list[Path]:
    """Find the tables of a split (default: the first), outside the folders ``others``."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder; put the files of {name} there, or fetch them with: "
            f"coat-vlm data download {name} --to {path.parent}"
        )
    split = split or next(iter(layouts))
    if split not in layouts:
        raise ValueError(f"{name} has no split {split!r}; allowed: {', '.join(layouts)}")
    files: list[Path] = []
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - set(others))
        files += [Path(parent) / one for one in sorted(names) if one.endswith(TABLES)]
    ends = {file: file.relative_to(path) for file in files}
    for patterns in layouts[split]:
        found = [
            [file for file, end in ends.items() if end.match(pattern) or end.match(f"{pattern}.gz")]
            for pattern in patterns
        ]
        if found[0]:
            return list(dict.fromkeys(chain.from_iterable(found)))
    wanted = "; or ".join(" with ".join(patterns) for patterns in layouts[split])
    raise make_no_questions_error(path, name, f"split {split}: looked for {wanted}")


def make_no_questions_error(path: Path, name: str, problem: str) -> DataError:
    """Make the error for a folder without questions of a benchmark."""
    out = path.parent if path.name == name else path
    return DataError(
        str(path),
        f"has no questions of {name}, {problem}",
        f"put them there (docs/reference/benchmarks.md lists the files), or fetch them with "
        f"coat-vlm data download {name} --to {out}",
    )


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or video in its own file; subclasses are stored elsewhere."""

    path: Path | str
    """The file, or its URL as text."""
    kind: MediaKind = "image"

    @property
    def name(self) -> str:
        """File, and the position in it."""
        return str(self.path)

    @property
    def place(self) -> str:
        """Unit that is read at once; empty for separate files."""
        return ""

    def load(self) -> Media:
        """Return the media item without opening a separate file; DataError if unreadable."""
        return Media(kind=self.kind, path=self.name)


@dataclass(frozen=True, slots=True)
class VideoClip(MediaFile):
    """A part of a video, or of a folder with its frames as JPEG."""

    start: float | None = None
    """Seconds, like the end; None for the whole video."""
    end: float | None = None
    fps: float | None = None

    @property
    def name(self) -> str:
        """The path, with start and end of the part in seconds."""
        part = "" if self.start is None else f"#t={self.start:g},{self.end:g}"
        return f"{self.path}{part}"

    def load(self) -> Media:
        """Return the clip without opening it."""
        frames = sorted(map(str, Path(self.path).glob("*.jpg"))) if self.fps else ()
        return Media(
            kind=self.kind,
            path=frames[0] if frames else str(self.path),
            start=self.start,
            end=self.end,
            frames=tuple(frames),
            fps=self.fps if frames else None,
        )


@dataclass(frozen=True, slots=True)
class VideoFrame(VideoClip):
    """The middle frame of a video, as an image (LLaVA scripts/extract_video_frames.py)."""

    def load(self) -> Media:
        """Decode the frame and return it in a lossless format."""
        from coat_data.media.video import read_frames

        video = Media(kind="video", path=str(self.path), start=self.start, end=self.end)
        buffer = io.BytesIO()
        read_frames(video, 1)[0].save(buffer, "PNG", compress_level=0)
        return Media(kind="image", path=self.name, data=buffer.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetImage(MediaFile):
    """An image in a Parquet file: ``{"bytes", "path"}``, or one of a list of them."""

    row: int
    """Counted from 0 over the file."""
    column: str
    pick: Literal["first", "middle"] = "first"
    """Element of a list; the middle one represents a video."""

    @property
    def name(self) -> str:
        """File, row (from 1) and column."""
        return f"{self.path}, row {self.row + 1}, {self.column}"

    @property
    def place(self) -> str:
        """File and row group; a row group is read as a whole."""
        group, _ = _locate_row(str(self.path), self.row)
        return f"{self.path}#{group:06d}"

    def load(self) -> Media:
        """Return the encoded image; DataError if there is none."""
        group, place = _locate_row(str(self.path), self.row)
        cell = _read_column(str(self.path), group, self.column)[place].as_py()
        if isinstance(cell, list):
            cell = (cell[len(cell) // 2 if self.pick == "middle" else 0]) if cell else None
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data:
            raise DataError(self.name, "holds no image", "download the file again")
        return Media(kind="image", path=self.name, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableImage(MediaFile):
    """An image in base64 in a TSV file of VLMEvalKit, which is read record by record."""

    row: int
    """Counted from 0 over the file."""

    @property
    def name(self) -> str:
        """File and row (from 1)."""
        return f"{self.path}, row {self.row + 1}"

    def load(self) -> Media:
        """Return the encoded image; DataError if the cell is not one."""
        csv.field_size_limit(sys.maxsize)
        starts = _find_records(str(self.path))
        with _open_table(str(self.path)) as file:
            header = file.readline().decode("utf-8-sig")
            file.seek(starts[self.row])
            record = file.read(starts[self.row + 1] - starts[self.row]).decode()
        names, cells = csv.reader(io.StringIO(header + record, newline=""), delimiter="\t")
        try:
            data = base64.b64decode(
                dict(zip(names, cells, strict=True))[IMAGE_COLUMN], validate=True
            )
        except (KeyError, ValueError) as error:
            raise DataError(self.name, f"holds no image: {error}", "download it again") from error
        return Media(kind="image", path=self.name, data=data)


def _open_table(path: str) -> Any:
    return gzip.open(path) if path.endswith(".gz") else Path(path).open("rb")


@lru_cache(maxsize=4)
def _find_records(path: str) -> tuple[int, ...]:
    """Return the offset of every record of a TSV file without its header, and its end."""
    starts, offset, quoted = [], 0, False
    with _open_table(path) as file:
        for line in file:
            if not quoted and line.strip():
                starts.append(offset)
            quoted ^= line.count(b'"') % 2 == 1
            offset += len(line)
    return (*starts[1:], offset)


@lru_cache(maxsize=64)
def _read_group_starts(path: str) -> tuple[int, ...]:
    """Return the first row of each row group, and the number of rows."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return tuple(accumulate(sizes, initial=0))


def _locate_row(path: str, row: int) -> tuple[int, int]:
    """Return the row group of a row, and its index in the group."""
    starts = _read_group_starts(path)
    group = bisect_right(starts, row) - 1
    return group, row - starts[group]


@lru_cache(maxsize=2)
def _read_column(path: str, group: int, column: str) -> Any:
    """Read one column of a row group; caches the last two for access in order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group, columns=[column]).column(0)
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read: {error}", "download it again") from error
