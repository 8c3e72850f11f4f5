"""Converts a source in any known format to a checked folder of Parquet shards.

The folder is described in :mod:`coat_data.containers.ingested` and opened by
:class:`~coat_data.load.dataset.SampleDataset`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from coat_data.containers.ingested import BAD_SAMPLES_NAME, Manifest, Shard, features, to_record
from coat_data.containers.remote_file import is_url
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Media, Sample, errors_within
from coat_data.saved_files import sync
from coat_data.tools.source import decode, list_bad, media_bytes, new_folder
from coat_data.tools.workers import Chunk, map_chunks, map_samples

_CHUNK_ROWS = 16  # rows that one process reads at a time; their media may be in memory
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
    workers: int | None = None,
    **options: Any,
) -> Manifest:
    """Check every row of ``path`` and write the good ones to ``out_dir``, completely or not at all.

    ``embed_media`` stores the media files' bytes in the shards, as is always done for media without
    files of their own. ``check_media`` decodes every image, and one frame of every video. Up to
    ``max_bad_samples`` bad rows are left out and listed in ``bad_samples.jsonl``.
    """
    out_dir = Path(out_dir).absolute()
    with new_folder(out_dir) as folder:
        dataset = SampleDataset(path, in_order=True, **options)
        bad: list[DataError] = []
        work = partial(_read_chunk, dataset.media_root, embed_media, check_media)
        chunks = map_chunks(dataset, work, "ingest", workers=workers, rows=_CHUNK_ROWS)
        records = _good_records(chain.from_iterable(chunks), bad, max_bad_samples)
        shards: list[Shard] = []
        for first in records:
            file = folder / f"part-{len(shards):05d}.parquet"
            rows = _write_shard(chain([first], islice(records, shard_rows - 1)), file)
            shards.append(Shard(name=file.name, rows=rows, size=file.stat().st_size))
        if not shards and not bad:
            raise DataError(str(path), "there are no rows", "give a file with at least one row")
        if len(bad) > max_bad_samples or not shards:
            shown = "".join(f"\n  {error}" for error in bad[:_ERRORS_SHOWN])
            hidden = len(bad) - _ERRORS_SHOWN
            more = f"\n  and {hidden} more" if hidden > 0 else ""
            counts = f"{len(bad)} of {len(dataset)} rows are bad, {max_bad_samples} allowed"
            remedy = (
                "fix or remove these rows, or allow more with max_bad_samples (at least one must "
                "be good)"
            )
            raise DataError(str(path), f"{counts}:{shown}{more}\n", remedy)
        if bad:
            list_bad(folder / BAD_SAMPLES_NAME, bad)
        manifest = Manifest(
            rows=sum(shard.rows for shard in shards),
            shards=tuple(shards),
            bad_samples=len(bad),
            source=str(path if is_url(path) else Path(path).absolute()),
            media_root=str(dataset.media_root),
        )
        manifest.write(folder)
        for file in (*folder.iterdir(), folder):
            sync(file)
    sync(out_dir.parent)
    return manifest


def _good_records(
    results: Iterable[dict[str, Any] | DataError], bad: list[DataError], max_bad: int
) -> Iterator[dict[str, Any]]:
    for result in results:
        if isinstance(result, DataError):
            bad.append(result)
        elif len(bad) <= max_bad:  # else the ingest fails, and writes no more rows
            yield result


def _read_chunk(
    media_root: Path | str, embed: bool, check: bool, samples: Chunk
) -> list[dict[str, Any] | DataError]:
    def convert(sample: Sample) -> dict[str, Any]:
        media: list[Media] = []
        with errors_within(sample.where):
            for item in sample.media:
                if embed and item.data is None:
                    item = dataclasses.replace(item, data=media_bytes(item))
                if check:
                    decode(item)
                media.append(item)
        return to_record(dataclasses.replace(sample, media=tuple(media)), media_root)

    return map_samples(samples, convert)


def _write_shard(records: Iterator[dict[str, Any]], path: Path) -> int:
    """Write all records to one Parquet file; returns their number.

    With the writer of ``datasets``, which splits pages by content, a full disk makes Arrow abort
    the process instead of raising OSError (measured with pyarrow 26).
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
