"""Rows of a folder written by :func:`coat_data.ingest.ingest`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_data.containers.remote_file import is_url
from coat_data.containers.table import open_parquet
from coat_data.sample import DataError
from coat_data.shards import Manifest, Shard, features


class Record(dict[str, Any]):
    """A row of a shard, in the columns of :func:`coat_data.shards.features`."""


class ShardRows:
    """The records of all shards, memory mapped.

    Attributes:
        media_root: as the manifest says.

    Raises:
        DataError: the folder does not hold what its manifest says.
    """

    random_access = True
    damage: DataError | None = None

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        self._source = manifest.source
        root = manifest.media_root
        self.media_root = root if is_url(root) else Path(root)
        for shard in manifest.shards:
            _check_shard(folder, shard)
        self._table = open_parquet([folder / shard.name for shard in manifest.shards], features())
        if not len(self._table) == manifest.rows == sum(shard.rows for shard in manifest.shards):
            raise DataError(
                str(folder),
                f"the shards hold {len(self._table)} rows, the manifest says {manifest.rows}",
                "ingest again",
            )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        return Record(self._table[index])

    def stream(self) -> Iterator[Record]:
        """Records in order."""
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> tuple[str, int]:
        """The file that was ingested; the record knows its row there."""
        return self._source, index


def _check_shard(folder: Path, shard: Shard) -> None:
    path = folder / shard.name
    if not path.is_file():
        raise DataError(str(path), "this shard is missing", "copy the whole folder or ingest again")
    size = path.stat().st_size
    if size != shard.size:
        raise DataError(
            str(path),
            f"this shard has {size} bytes, the manifest says {shard.size}",
            "copy the folder again or ingest again",
        )
