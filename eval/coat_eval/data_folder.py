"""The local files of one benchmark: its tables, found by their official names, and its media."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from coat_data.sample import DataError, MediaKind
from coat_eval.shown import Shown, ShownCell, ShownFile
from coat_eval.table import Table, read_table

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

    def cell(self, column: str, pick: Literal["first", "middle"] = "first") -> ShownCell:
        """The image in a column of a Parquet file."""
        return ShownCell(self.table.path, self.index, column, pick)

    @property
    def in_parquet(self) -> bool:
        """Whether the row is from a Parquet file, which holds the images."""
        return self.table.path.suffix == ".parquet"


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
    ) -> Shown:
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
