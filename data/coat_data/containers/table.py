"""Rows of Parquet files, of ``datasets`` folders (``save_to_disk``) and of their ``.arrow`` files.

In order, Parquet is read a few rows at a time. By number, it is read through memory-mapped Arrow
files in the cache of ``datasets``, which are made when more than :data:`_PROBED` rows are read.
"""

import errno
import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coat_data.containers.rows import Rows, locate
from coat_data.sample import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS_PER_BATCH = 32  # rows held while reading in order; each may carry its images
_PROBED = 16  # rows that are read by number from Parquet itself
_DELETE = "delete the folder; this copy is made again"
_ARROW_FILE = b"ARROW1"


class TableRows(Rows):
    """The rows of one table in several files; no files for a folder written by ``save_to_disk``.

    DataError if a file is damaged, the columns of files differ, or a folder has several splits.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path = path
        self._files = list(files)
        self._table: Dataset | None = None
        self._num_probed = 0
        self.media_root = path if path.is_dir() else path.parent
        self._groups: list[tuple[int, int]] = []  # file and row group
        self._starts = np.zeros(0, dtype=np.int64)  # first row of each of them
        self._ahead: Iterator[tuple[int, Any]] = iter(())  # batches behind self._batch
        self._batch: tuple[int, Any] = (-1, [])  # first row, and the batch
        self._is_parquet = bool(files) and not is_arrow(self._files[0])
        if self._is_parquet:
            groups, self._schema, self._is_cast = _parquet_facts(self._files)
            self.columns = self._schema.names
            counts = [sum(sizes) for sizes in groups]
            self._groups = [(i, j) for i, sizes in enumerate(groups) for j in range(len(sizes))]
            self._starts = np.cumsum([0, *(size for sizes in groups for size in sizes)])[:-1]
        else:
            counts, self._table = _open_arrow(self._files) if files else _open_saved(path)
            self.columns = list(self._table.column_names)
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._table is None and self._num_probed < _PROBED:
            self._num_probed += 1
            (_, row), *_ = self.read_range(range(index, index + 1))
            if isinstance(row, DataError):
                raise row
            return row
        if self._table is None:
            schema = self._schema if self._is_cast else None
            self._table = open_parquet(self._files, schema).with_format("arrow")
        rows: Any = self._table[int(index)]  # an Arrow table of one row
        return rows.to_pylist()[0]

    def read_range(self, rows: range) -> Iterator[tuple[int, Any]]:
        """Yield consecutive rows; a DataError replaces the unreadable rest of a row group."""
        if not self._is_parquet:
            yield from super().read_range(rows)
            return
        end: tuple[int, Any] = (len(self), [])
        group = max(0, int(np.searchsorted(self._starts, rows.start, side="right")) - 1)
        if rows and not self._starts[group] <= self._batch[0] <= rows.start:
            self._ahead = self._batches(group)
            self._batch = next(self._ahead, end)
        while rows and (first := self._batch[0]) < rows.stop:
            batch = self._batch[1]
            start, stop = max(0, rows.start - first), min(len(batch), rows.stop - first)
            if start < stop:
                damaged = isinstance(batch, list)
                found = batch if damaged else batch.slice(start, stop - start).to_pylist()
                yield from enumerate(found, first + start)
            if first + len(batch) > rows.stop:
                return  # the next range starts in this batch
            self._batch = next(self._ahead, end)

    def _batches(self, group: int) -> Iterator[tuple[int, Any]]:
        """Yield first row and Arrow batch, or a list of the DataError that ends a row group."""
        from datasets.table import table_cast
        from pyarrow import ArrowException, Table
        from pyarrow.parquet import ParquetFile

        for (number, own), start in zip(self._groups[group:], self._starts[group:], strict=True):
            first, path = int(start), self._files[number]
            try:
                with ParquetFile(path) as file:
                    for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[own]):
                        table = Table.from_batches([batch])
                        yield first, table_cast(table, self._schema) if self._is_cast else table
                        first += len(batch)
            except (ArrowException, OSError) as error:
                problem = f"is damaged: {error}"
                yield first, [DataError(self.name(path), problem, "copy the file again")]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": iter(()), "_batch": (-1, [])}

    def place(self, index: int) -> tuple[str, int]:
        """Return the file, and the row in it."""
        if not self._files:
            return str(self._path), index
        number, row = locate(self._ends, index)
        return self.name(self._files[number]), row


def is_arrow(path: Path) -> bool:
    """Whether the file is in one of Arrow's two formats, by its first bytes."""
    with path.open("rb") as stream:
        head = stream.read(6)
    return head == _ARROW_FILE or (head[:4] == b"\xff" * 4 and path.suffix == ".arrow")


def _open_saved(folder: Path) -> "tuple[list[int], Dataset]":
    import datasets

    try:
        table = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a folder written by datasets: {error}"
        raise DataError(str(folder), problem, "save it again with save_to_disk") from error
    if not isinstance(table, datasets.Dataset):
        problem = f"holds the splits {', '.join(map(str, table))}"
        raise DataError(str(folder), problem, "name the folder of one of them")
    return [len(table)], table.with_format("arrow")


def _open_arrow(files: Sequence[Path]) -> "tuple[list[int], Dataset]":
    import datasets
    from pyarrow import ArrowException

    parts: list[Dataset] = []
    for path in files:
        try:
            parts.append(datasets.Dataset.from_file(str(path)).with_format("arrow"))
        except (ArrowException, OSError, ValueError, KeyError) as error:
            problem = f"is not a file of datasets: {error}"
            remedy = "copy the file again, or save the table as Parquet"
            raise DataError(str(path), problem, remedy) from error
        if parts[-1].features != parts[0].features:
            raise DataError(
                str(path),
                f"has the columns {parts[-1].features}, the file before it {parts[0].features}",
                "name files of one kind only",
            )
    return [len(part) for part in parts], datasets.concatenate_datasets(parts)


def _parquet_facts(files: Sequence[Path]) -> "tuple[list[list[int]], pa.Schema, bool]":
    """Return the rows of each row group of each file, the schema, and whether a file has another.

    All files are read with one schema: a column is null in one file and text in another, or its
    structs have more fields. DataError if no type holds the values of a column unchanged.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    groups: list[list[int]] = []
    types: dict[str, pa.DataType] = {}
    schemas: list[dict[str, pa.DataType]] = []
    for path in files:
        try:
            with ParquetFile(path) as file:
                sizes = (file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
                groups.append(list(sizes))
                own = {field.name: field.type for field in file.schema_arrow}
        except (pa.ArrowException, OSError) as error:
            raise DataError(str(path), f"is not Parquet: {error}", "copy the file again") from error
        types = types or dict(own)
        if own.keys() != types.keys():
            problem = f"has the columns {[*own]}, the file before it {[*types]}"
            raise DataError(str(path), problem, "name files of one kind only")
        for name, kind in own.items():
            common = _common_type(types[name], kind)
            if common is None:
                problem = f"the column {name} is {kind}, and {types[name]} in the files before it"
                raise DataError(str(path), problem, "write it with one type in all files")
            types[name] = common
        schemas.append(own)
    return groups, pa.schema(list(types.items())), any(own != types for own in schemas)


def _common_type(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType | None":
    """Return a type that holds the values of both types unchanged, if there is one."""
    import pyarrow as pa
    from pyarrow import types

    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_struct(one) and types.is_struct(other):
        fields: dict[str, pa.DataType] = {field.name: field.type for field in one}
        for field in other:
            common = _common_type(fields.get(field.name, field.type), field.type)
            if common is None:
                return None
            fields[field.name] = common
        return pa.struct(list(fields.items()))
    if types.is_list(one) and types.is_list(other):
        common = _common_type(one.value_type, other.value_type)
        return common and pa.list_(common)
    for is_kind, widest in (
        (types.is_signed_integer, pa.int64()),
        (types.is_floating, pa.float64()),
        (lambda kind: types.is_string(kind) or types.is_large_string(kind), pa.large_string()),
        (lambda kind: types.is_binary(kind) or types.is_large_binary(kind), pa.large_binary()),
    ):
        if is_kind(one) and is_kind(other):
            return widest
    return None


def open_parquet(files: Sequence[Path], schema: "pa.Schema | None" = None) -> "Dataset":
    """Open Parquet files as one memory-mapped table, which all ranks and workers of a host share.

    ``datasets`` converts them to Arrow files in its cache (``HF_DATASETS_CACHE``), under a lock and
    keyed by the shards' paths and modification times. A cache that is read-only is read without it.
    """
    from datasets import Dataset, Features, config
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils.typing import PathLike
    from pyarrow.parquet import read_metadata

    try:
        # The paths are patterns to datasets: a folder named "run[1]" must match itself.
        patterns: list[PathLike] = [glob.escape(str(path)) for path in files]
        features = None if schema is None else Features.from_arrow_schema(schema)
        read = partial(Dataset.from_parquet, patterns, features=features)
        try:
            table = read()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            with _without_locks():
                table = read()
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise error.__cause__ from error  # such as a full disk, which is not the data's fault
        problem = f"a shard cannot be read: {error.__cause__}"
        remedy = "copy the files again, or ingest again"
        raise DataError(str(files[0].parent), problem, remedy) from error
    except OSError as error:
        if error.errno is not None:
            raise
        cache = str(config.HF_DATASETS_CACHE)
        raise DataError(cache, f"a copy of {files[0]} is damaged: {error}", _DELETE) from error
    assert isinstance(table, Dataset)
    rows = sum(read_metadata(path).num_rows for path in files)
    if len(table) != rows:
        copy = str(Path(table.cache_files[0]["filename"]).parent)
        raise DataError(copy, f"has {len(table)} of the {rows} rows of {files[0]}", _DELETE)
    return table


@contextmanager
def _without_locks() -> Iterator[None]:
    """Let ``datasets`` read a cache that nobody can write."""
    import datasets.builder

    lock = datasets.builder.FileLock
    datasets.builder.FileLock = lambda _: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        datasets.builder.FileLock = lock
