"""Rows of Parquet files and of ``datasets`` folders (``save_to_disk``).

In order, Parquet is read a few rows at a time. By number, it is read through the memory-mapped
Arrow files of the cache of ``datasets``, which are made when the first row is asked for.
"""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coat_data.containers.rows import Rows, locate
from coat_data.sample import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features

_ROWS_PER_BATCH = 32
"""Rows held while reading in order; each may carry its images."""


class TableRows(Rows):
    """The rows of one table in several files.

    Attributes:
        media_root: the folder of the first file.
        columns: names of the columns.

    Args:
        path: for messages: the file or folder that the user named.
        files: Parquet files in order, or nothing for a folder written by ``save_to_disk``.

    Raises:
        DataError: a file is not what its name says, or their columns differ.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path = path
        self._files = list(files)
        self._table: Dataset | None = None
        self.media_root = path if path.is_dir() else path.parent
        if files:
            counts, self.columns = _parquet_facts(self._files)
        else:
            self._table = open_disk(path)
            counts, self.columns = [len(self._table)], list(self._table.column_names)
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._table is None:
            self._table = open_parquet(self._files).with_format("arrow")
        rows: Any = self._table[int(index)]  # an Arrow table of one row
        return rows.to_pylist()[0]

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of the rest of a damaged file."""
        if not self._files:
            yield from super().stream()
            return
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        for path in self._files:
            try:
                with ParquetFile(path) as file:
                    for batch in file.iter_batches(_ROWS_PER_BATCH):
                        yield from batch.to_pylist()
            except (ArrowException, OSError) as error:
                yield DataError(str(path), f"is damaged: {error}", "copy the file again")

    def place(self, index: int) -> tuple[str, int]:
        """The Parquet file and the row in it."""
        if not self._files:
            return str(self._path), index
        number, row = locate(self._ends, index)
        return str(self._files[number]), row


def _parquet_facts(files: Sequence[Path]) -> tuple[list[int], list[str]]:
    """Rows of each file, and the columns that all have."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    counts: list[int] = []
    columns: list[str] = []
    for path in files:
        try:
            with ParquetFile(path) as file:
                counts.append(file.metadata.num_rows)
                names = list(file.schema_arrow.names)
        except (ArrowException, OSError) as error:
            raise DataError(str(path), f"is not Parquet: {error}", "copy the file again") from error
        columns = columns or names
        if set(names) != set(columns):
            raise DataError(
                str(path),
                f"has the columns {names}, the file before it {columns}",
                "name files of one kind only",
            )
    return counts, columns


def open_parquet(files: Sequence[Path], features: "Features | None" = None) -> "Dataset":
    """Parquet files as one memory-mapped table.

    ``datasets`` turns Parquet into Arrow files in its own cache (``HF_DATASETS_CACHE``, by default
    ``~/.cache/huggingface/datasets``), under a lock and keyed by the shards' paths and modification
    times. All ranks and workers of a host then share one mapping; reading Parquet into memory would
    hold a copy per rank, media included where they are embedded.

    Args:
        files: the Parquet files.
        features: the columns; those that the files declare by default.

    Raises:
        DataError: a file cannot be read.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils.typing import PathLike

    try:
        # The paths are patterns to datasets: a folder named "run[1]" must match itself.
        patterns: list[PathLike] = [glob.escape(str(path)) for path in files]
        table = Dataset.from_parquet(patterns, features=features)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise error.__cause__ from error  # such as a full disk, which is not the data's fault
        raise DataError(
            str(files[0].parent),
            f"a shard cannot be read: {error.__cause__}",
            "copy the files again, or ingest again",
        ) from error
    assert isinstance(table, Dataset)
    return table


def open_disk(folder: Path) -> "Dataset":
    """A folder written by ``Dataset.save_to_disk``, memory mapped; media stay encoded.

    Raises:
        DataError: it holds several splits, or cannot be read.
    """
    from datasets import Dataset, load_from_disk

    try:
        table = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a folder written by datasets: {error}"
        raise DataError(str(folder), problem, "save it again with save_to_disk") from error
    if not isinstance(table, Dataset):
        splits = ", ".join(str(split) for split in table)
        raise DataError(str(folder), f"holds the splits {splits}", "name the folder of one of them")
    return table.with_format("arrow")
