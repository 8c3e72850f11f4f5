"""Writes the samples of a source as LLaVA JSON, messages JSONL or WebDataset tars.

Every row is read back by the reader of its format before it is kept: a sample that the format
cannot hold is left out and listed, never changed.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from tqdm import tqdm

from coat_data.containers.tar import KEY
from coat_data.dataset import SampleDataset
from coat_data.media_root import MediaRoot
from coat_data.new_folder import new_folder
from coat_data.readers import llava, messages, webdataset
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample
from coat_data.writers.media_folder import MediaFolder, media_bytes, media_suffix
from coat_data.writers.rows import check_same, llava_row, messages_row

ExportFormat = Literal["llava", "messages", "webdataset"]
BAD_NAME = "left_out.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What was written."""

    rows: int
    left_out: int
    """Bad samples, and samples that the format cannot hold; ``left_out.jsonl`` lists them."""
    path: Path
    """What to open again: the data file, or the folder of tars."""


class _Writer(Protocol):
    def write(self, sample: Sample) -> None: ...


def export(
    path: str | Path,
    out_dir: str | Path,
    to: ExportFormat,
    *,
    keep_paths: bool = False,
    shard_rows: int = 1000,
    progress: bool = True,
    **options: Any,
) -> ExportSummary:
    """Write every good sample of ``path`` to the new folder ``out_dir``.

    Args:
        path: as :class:`SampleDataset` takes it.
        out_dir: folder to make; it appears when everything is on disk, or not at all.
        to: ``llava`` writes data.json, ``messages`` data.jsonl, both beside a folder of the media;
            ``webdataset`` tars with the media inside.
        keep_paths: do not copy media; name them relative to the source's media root.
        shard_rows: samples per tar.
        progress: show a progress bar.
        options: further arguments of :class:`SampleDataset`.

    Raises:
        DataError: the source cannot be opened, no sample is good, or ``out_dir`` is not empty.
        ValueError: tars are to keep paths, or ``shard_rows`` < 1.
    """
    if to == "webdataset" and keep_paths:
        raise ValueError("keep_paths: the tars of a WebDataset hold their media")
    if shard_rows < 1:
        raise ValueError(f"shard_rows={shard_rows} must be at least 1")
    dataset = SampleDataset(path, in_order=True, **options)
    rows = left_out = 0
    why = "there are no rows"
    total = len(dataset) if dataset.random_access else None
    with new_folder(out_dir) as folder:
        media = MediaFolder(folder, dataset.media_root if keep_paths else None)
        with _open_writer(folder, to, media, shard_rows) as writer:
            for sample in tqdm(dataset.stream(), f"export {to}", total, disable=not progress):
                try:
                    if isinstance(sample, DataError):
                        raise sample
                    writer.write(sample)
                    rows += 1
                except DataError as error:
                    left_out += 1
                    _list(folder / BAD_NAME, error)
                    if left_out == 1:
                        why = str(error)
        if not rows:
            raise DataError(
                str(path), f"no sample can be exported: {why}", "see coat-vlm data lint"
            )
    name = {"llava": "data.json", "messages": "data.jsonl", "webdataset": "."}[to]
    return ExportSummary(rows=rows, left_out=left_out, path=Path(out_dir) / name)


def _list(path: Path, error: DataError) -> None:
    row = {"where": error.where, "problem": error.problem, "remedy": error.remedy}
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


@contextmanager
def _open_writer(
    folder: Path, to: ExportFormat, media: MediaFolder, shard_rows: int
) -> Iterator[_Writer]:
    if to == "webdataset":
        writer = _TarWriter(folder, shard_rows)
        try:
            yield writer
        finally:
            writer.close()
        return
    name = "data.json" if to == "llava" else "data.jsonl"
    with (folder / name).open("w", encoding="utf-8") as stream:
        if to == "messages":
            yield _MessagesWriter(stream, media, folder)
            return
        stream.write("[")
        yield _LlavaWriter(stream, media, folder)
        stream.write("\n]\n")


def _place(sample: Sample, folder: Path) -> Place:
    return Place(source=sample.source, row=sample.row, root=MediaRoot(folder, follow_links=True))


class _LlavaWriter:
    def __init__(self, stream: TextIO, media: MediaFolder, folder: Path) -> None:
        self._stream = stream
        self._media = media
        self._folder = folder
        self._separator = "\n"

    def write(self, sample: Sample) -> None:
        trial = llava_row(sample, ["m"] * len(sample.media))
        check_same(sample, llava.to_sample(trial, _place(sample, self._folder)), "LLaVA JSON")
        row = llava_row(sample, [self._media.add(medium) for medium in sample.media])
        self._stream.write(self._separator + json.dumps(row))
        self._separator = ",\n"


class _MessagesWriter:
    def __init__(self, stream: TextIO, media: MediaFolder, folder: Path) -> None:
        self._stream = stream
        self._media = media
        self._folder = folder

    def write(self, sample: Sample) -> None:
        trial = messages_row(sample, ["m"] * len(sample.media))
        check_same(sample, messages.to_sample(trial, _place(sample, self._folder)), "messages")
        row = messages_row(sample, [self._media.add(medium) for medium in sample.media])
        self._stream.write(json.dumps(row) + "\n")


class _TarWriter:
    """Tars ``00000.tar``, ...: per sample a ``.json`` with messages, and its media in order."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self._folder = folder
        self._shard_rows = shard_rows
        self._count = 0
        self._archive: tarfile.TarFile | None = None

    def write(self, sample: Sample) -> None:
        key = f"{self._count:09d}"
        row: dict[str, Any] = {KEY: key}
        row["json"] = json.dumps(messages_row(sample, None)).encode("ascii")
        for number, medium in enumerate(sample.media):
            row[f"{number:03d}{media_suffix(medium)}"] = media_bytes(medium)
        check_same(sample, webdataset.to_sample(row, _place(sample, self._folder)), "WebDataset")
        if self._count % self._shard_rows == 0:
            self.close()
            name = f"{self._count // self._shard_rows:05d}.tar"
            self._archive = tarfile.open(self._folder / name, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        assert self._archive is not None
        for field, data in row.items():
            if field != KEY:
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                self._archive.addfile(info, io.BytesIO(data))
        self._count += 1

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._archive = None
