"""Images and videos of benchmarks, read only when their question is asked.

Each kind has a ``name`` for messages and fingerprints, a ``kind`` (image or video), a ``place``
(things of one place are cheap to read one after the other), and ``load``.
"""

import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from coat_data.sample import DataError, Media, MediaKind


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
    from bisect import bisect_right

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
