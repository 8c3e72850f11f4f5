"""Turns a source in any known format into a checked folder of Parquet shards.

The folder is described in :mod:`coat_data.containers.ingested` and opened by
:class:`~coat_data.load.dataset.SampleDataset`.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from coat_data.containers.ingested import (
    BAD_SAMPLES_NAME,
    MANIFEST_NAME,
    Manifest,
    Shard,
    features,
    to_record,
)
from coat_data.containers.remote_file import is_url
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Media, Sample
from coat_data.tools.source import decode, list_bad, media_bytes, new_folder, walk

_ERRORS_SHOWN = 5
_ROWS_IN_MEMORY = 200
"""Rows per Parquet row group; bounds the memory that embedded media need while writing."""


def ingest(
    path: str | Path,
    out_dir: str | Path,
    *,
    embed_media: bool = False,
    check_media: bool = True,
    max_bad_samples: int = 0,
    shard_rows: int = 10_000,
    overwrite: bool = False,
    **options: Any,
) -> Manifest:
    """Check every row of ``path`` and write the good ones to ``out_dir``.

    ``out_dir`` appears when everything is on disk, or not at all.

    Args:
        path: a data file, folder, pattern or list, as :class:`SampleDataset` takes it.
        out_dir: folder to make.
        embed_media: store the media files' bytes in the shards. Media that have no files of their
            own (in tars and Parquet) are always stored.
        check_media: decode every image, and one frame of every video.
        max_bad_samples: bad rows that may be left out; they are listed in ``bad_samples.jsonl``.
        shard_rows: rows per Parquet file.
        overwrite: replace ``out_dir`` if it is an ingested folder.
        options: further arguments of :class:`SampleDataset`.

    Raises:
        DataError: the file does not parse, or more than ``max_bad_samples`` rows are bad (names the
            first ones), or no row is good.
        ValueError: ``out_dir`` exists and may not be replaced, ``shard_rows`` < 1, or there is no
            such format.
    """
    out_dir = Path(out_dir).absolute()
    if shard_rows < 1:
        raise ValueError(f"shard_rows={shard_rows} must be at least 1")
    replace = out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir()))
    if replace and not overwrite:
        raise ValueError(f"{out_dir} exists already; choose another folder or set overwrite")
    if replace and not (out_dir / MANIFEST_NAME).is_file():
        raise ValueError(
            f"{out_dir} is not an ingested folder (it has no {MANIFEST_NAME}) and will not be "
            "replaced; choose another folder or delete it yourself"
        )
    with new_folder(out_dir, replace=replace) as folder:
        dataset = SampleDataset(path, in_order=True, **options)
        loader = _Loader(dataset, embed=embed_media, check=check_media)
        records = (
            to_record(sample, dataset.media_root)
            for sample in loader.good_samples()
            if len(loader.bad) <= max_bad_samples  # nothing is kept of an ingest that will fail
        )
        shards = _write_shards(records, folder, shard_rows)
        if len(loader.bad) > max_bad_samples or not shards:
            raise _too_many_bad(str(path), loader.bad, loader.num_rows, max_bad_samples)
        if loader.bad:
            list_bad(folder / BAD_SAMPLES_NAME, loader.bad)
        manifest = Manifest(
            rows=sum(shard.rows for shard in shards),
            shards=tuple(shards),
            bad_samples=len(loader.bad),
            source=str(path if is_url(path) else Path(path).absolute()),
            source_sha256=_sha256(Path(path)) if Path(path).is_file() else "",
            media_root=str(dataset.media_root),
            embedded=embed_media or loader.num_stored > 0,
        )
        manifest.write(folder)
        _sync(*folder.iterdir(), folder)
    _sync(out_dir.parent)
    return manifest


class _Loader:
    """Reads and checks the samples of a dataset.

    Attributes:
        bad: what is wrong with the rows that were left out.
        num_rows: rows met.
        num_stored: media that were stored because they have no file of their own.
    """

    def __init__(self, dataset: SampleDataset, *, embed: bool, check: bool) -> None:
        self.bad: list[DataError] = []
        self.num_rows = 0
        self.num_stored = 0
        self._dataset = dataset
        self._embed = embed
        self._check = check

    def good_samples(self) -> Iterator[Sample]:
        """The samples that pass every check."""
        for sample in walk(self._dataset, "ingest"):
            self.num_rows += 1
            if isinstance(sample, DataError):
                self.bad.append(sample)
                continue
            try:
                media = tuple(self._load(item) for item in sample.media)
            except DataError as error:
                self.bad.append(error.within(sample.where))
            else:
                yield dataclasses.replace(sample, media=media)

    def _load(self, media: Media) -> Media:
        if media.data is not None:
            self.num_stored += 1
        elif self._embed:
            media = dataclasses.replace(media, data=media_bytes(media))
        if self._check:
            decode(media)
        return media


def _write_shards(records: Iterator[dict[str, Any]], folder: Path, shard_rows: int) -> list[Shard]:
    shards: list[Shard] = []
    for first in records:
        path = folder / f"part-{len(shards):05d}.parquet"
        rows = _write_shard(chain([first], islice(records, shard_rows - 1)), path)
        shards.append(
            Shard(name=path.name, rows=rows, size=path.stat().st_size, sha256=_sha256(path))
        )
    return shards


def _write_shard(records: Iterator[dict[str, Any]], path: Path) -> int:
    """Write all records to one Parquet file in the schema of ``datasets``; returns their number.

    Not by the writer of ``datasets``: it chunks by content, and with that a full disk makes Arrow's
    C++ code abort the process instead of raising OSError (measured with pyarrow 26).
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = features().arrow_schema
    rows = 0
    with path.open("wb") as stream, ParquetWriter(stream, schema) as writer:
        while group := list(islice(records, _ROWS_IN_MEMORY)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
            rows += len(group)
    return rows


def _too_many_bad(path: str, bad: list[DataError], rows: int, allowed: int) -> DataError:
    if not rows:
        return DataError(path, "there are no rows", "give a file with at least one row")
    shown = "".join(f"\n  {error}" for error in bad[:_ERRORS_SHOWN])
    more = f"\n  and {len(bad) - _ERRORS_SHOWN} more" if len(bad) > _ERRORS_SHOWN else ""
    return DataError(
        path,
        f"{len(bad)} of {rows} rows are bad, {allowed} allowed:{shown}{more}\n",
        "fix or remove these rows, or allow more with max_bad_samples (at least one must be good)",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(*paths: Path) -> None:
    """Wait until the files or folders are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
