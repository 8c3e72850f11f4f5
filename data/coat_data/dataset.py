"""Map-style access to the samples of one file or ingested folder."""

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coat_data import shards
from coat_data.readers import llava
from coat_data.sample import DataError, Sample
from coat_data.shards import Manifest, Shard

if TYPE_CHECKING:
    from datasets import Dataset


class SampleDataset:
    """The samples of a LLaVA JSON or JSONL file, or of a folder written by :func:`ingest`.

    Cheap to send to worker processes: a file's rows are one block of bytes, a folder's are memory
    mapped.

    Attributes:
        name: name in messages and tables; the file's or folder's name by default.
        media_root: absolute folder that relative media paths start from.

    Args:
        path: the file or folder.
        media_root: defaults to the file's folder, or to what the manifest says.
        name: see above.

    Raises:
        DataError: ``path`` or ``media_root`` does not exist, the file does not parse, or the folder
            does not hold what its manifest says.
    """

    def __init__(
        self, path: str | Path, media_root: str | Path | None = None, name: str | None = None
    ) -> None:
        path = Path(path).absolute()
        if not path.exists():
            raise DataError(
                str(path),
                "there is no such file or folder",
                "give a LLaVA .json or .jsonl file, or a folder written by coat-vlm data ingest",
            )
        if media_root is not None and not Path(media_root).is_dir():
            raise DataError(
                str(media_root), "media_root is not a folder", "give the folder of the media files"
            )
        self.name = path.stem if name is None else name
        self._rows = _ShardRows(path) if path.is_dir() else _JsonRows(path)
        self.media_root = Path(media_root or self._rows.media_root).absolute()

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
        return self._rows.sample(int(index), self.media_root)


class _JsonRows:
    """Rows of a file as JSON in one block of bytes.

    A list of dicts would be copied page by page into every worker process, because reading an
    object changes its reference count.
    """

    def __init__(self, path: Path) -> None:
        self._source = str(path)
        self.media_root = path.parent
        encoded = [json.dumps(row).encode("ascii") for row in llava.read_rows(path)]
        self._ends = np.cumsum([len(row) for row in encoded], dtype=np.int64)
        self._block = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    def sample(self, index: int, media_root: Path) -> Sample:
        start = self._ends[index - 1] if index else 0
        row = json.loads(self._block[start : self._ends[index]])
        return llava.to_sample(row, row_number=index, source=self._source, media_root=media_root)


class _ShardRows:
    """Rows of an ingested folder, memory mapped."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        self._source = manifest.source
        self.media_root = Path(manifest.media_root)
        for shard in manifest.shards:
            _check_shard(folder, shard)
        self._table = _open_shards([folder / shard.name for shard in manifest.shards])
        if not len(self._table) == manifest.rows == sum(shard.rows for shard in manifest.shards):
            raise DataError(
                str(folder),
                f"the shards hold {len(self._table)} rows, the manifest says {manifest.rows}",
                "ingest again",
            )

    def __len__(self) -> int:
        return len(self._table)

    def sample(self, index: int, media_root: Path) -> Sample:
        return shards.to_sample(self._table[index], source=self._source, media_root=media_root)


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


def _open_shards(paths: list[Path]) -> "Dataset":
    """The shards as one memory-mapped table.

    ``datasets`` turns Parquet into Arrow files in its own cache (``HF_DATASETS_CACHE``, by default
    ``~/.cache/huggingface/datasets``), under a lock and keyed by the shards' paths and modification
    times. All ranks and workers of a host then share one mapping; reading Parquet into memory would
    hold a copy per rank, media included where they are embedded.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils.typing import PathLike

    try:
        # The paths are patterns to datasets: a folder named "run[1]" must match itself.
        files: list[PathLike] = [glob.escape(str(path)) for path in paths]
        table = Dataset.from_parquet(files, features=shards.features())
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise error.__cause__ from error  # such as a full disk, which is not the data's fault
        raise DataError(
            str(paths[0].parent), f"a shard cannot be read: {error.__cause__}", "ingest again"
        ) from error
    assert isinstance(table, Dataset)
    return table
