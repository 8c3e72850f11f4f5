"""Writes the samples of a source as LLaVA JSON, messages JSONL or WebDataset tars.

Every row is read back by the reader of its format before it is kept: a sample that the format
cannot hold is left out and listed, never changed. Media are copied into a folder beside the rows,
or named where they are.
"""

import dataclasses
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from coat_data.containers.folder import VIDEO_SUFFIXES
from coat_data.containers.remote_file import is_url
from coat_data.containers.tar import KEY
from coat_data.load.dataset import SampleDataset
from coat_data.media.image import IMAGE_FORMATS, image_suffixes
from coat_data.media.remote_media import fetched
from coat_data.media.root import MediaRoot
from coat_data.readers import llava, messages, webdataset
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Media, Part, Role, Sample, Turn
from coat_data.tools.source import list_bad, media_bytes, new_folder, walk

FOLDER = "media"
"""Name of the folder beside the exported rows."""

_FILES_PER_FOLDER = 1000


ExportFormat = Literal["llava", "messages", "webdataset"]
BAD_NAME = "left_out.jsonl"

_NAMES: Mapping[ExportFormat, str] = {
    "llava": "data.json",
    "messages": "data.jsonl",
    "webdataset": ".",
}

_SPEAKERS: Mapping[Role, str] = {"system": "system", "user": "human", "assistant": "gpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What was written."""

    rows: int
    left_out: int
    """Bad samples, and samples that the format cannot hold; ``left_out.jsonl`` lists them."""
    path: Path
    """What to open again: the data file, or the folder of tars."""


def export(
    path: str | Path,
    out_dir: str | Path,
    to: ExportFormat,
    *,
    keep_paths: bool = False,
    shard_rows: int = 1000,
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
    with new_folder(out_dir) as folder:
        keep_root = dataset.media_root if keep_paths else None
        if to == "webdataset":
            writer = _TarWriter(folder, shard_rows)
        else:
            writer = _JsonWriter(folder, to, keep_root)
        with closing(writer):
            for sample in walk(dataset, f"export {to}"):
                try:
                    if isinstance(sample, DataError):
                        raise sample
                    writer.write(sample)
                    rows += 1
                except DataError as error:
                    left_out += 1
                    list_bad(folder / BAD_NAME, [error])
                    if left_out == 1:
                        why = str(error)
        if not rows:
            raise DataError(
                str(path), f"no sample can be exported: {why}", "see coat-vlm data lint"
            )
    return ExportSummary(rows=rows, left_out=left_out, path=Path(out_dir) / _NAMES[to])


def media_suffix(media: Media) -> str:
    """The ending of a medium's file name: its own if it fits the kind, else by its content."""
    own = Path(media.path or "").suffix.lower()
    if media.kind == "video":
        is_folder = media.data is None and Path(media.path or "").is_dir()
        return "" if is_folder else own if own in VIDEO_SUFFIXES else ".mp4"
    if own in image_suffixes():
        return own
    try:
        with Image.open(io.BytesIO(media_bytes(media)), formats=IMAGE_FORMATS) as image:
            return f".{(image.format or 'img').lower()}"
    except Exception:  # whatever Pillow raises: an image that nobody can read is copied as it is
        return ".img"


def llava_row(sample: Sample, names: Sequence[str]) -> dict[str, Any]:
    """The sample as a row of LLaVA's JSON.

    Args:
        sample: what to write.
        names: path of each medium, relative to the media root.
    """
    row = _head(sample)
    for kind in ("image", "video"):
        own = [
            {"path": name, **span} if (span := _span(medium)) else name
            for medium, name in zip(sample.media, names, strict=True)
            if medium.kind == kind
        ]
        if own:
            row[kind] = own[0] if len(own) == 1 else own
    row["conversations"] = []
    for turn in sample.turns:
        texts = [part.text if part.kind == "text" else f"<{part.kind}>" for part in turn.parts]
        row["conversations"].append({"from": _SPEAKERS[turn.role], "value": "".join(texts)})
    return row


def messages_row(sample: Sample, names: Sequence[str] | None) -> dict[str, Any]:
    """The sample as chat messages with content parts.

    Args:
        sample: what to write.
        names: path of each medium, relative to the media root; None leaves them out, for media
            that stand beside the row in order.
    """
    waiting = iter(zip(sample.media, names or [""] * len(sample.media), strict=True))
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
                continue
            medium, name = next(waiting)
            path = {"path": name} if names is not None else {}
            content.append({"type": part.kind, **path, **_span(medium)})
        messages.append({"role": turn.role, "content": content})
    return {**_head(sample), "messages": messages}


def joined(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with neighbouring texts in one part: equal lists are the same conversation."""
    found: list[Turn] = []
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            if part.kind == "text" and parts and parts[-1].kind == "text":
                parts[-1] = Part("text", parts[-1].text + part.text)
            elif part.kind != "text" or part.text:
                parts.append(part)
        found.append(Turn(turn.role, tuple(parts)))
    return found


def check_same(sample: Sample, read: Sample, format_name: str) -> None:
    """Raise unless what was read back is what was written.

    Raises:
        DataError: the format cannot say what the sample says.
    """

    def media(of: Sample) -> list[Media]:
        return [dataclasses.replace(medium, path=None, data=None) for medium in of.media]

    same = joined(sample.turns) == joined(read.turns) and media(sample) == media(read)
    if not same or sample.continues != read.continues:
        raise DataError(
            sample.where,
            f"cannot be written as {format_name}: read back, it is another conversation",
            "export it as messages, which can hold every sample",
        )


def _head(sample: Sample) -> dict[str, Any]:
    """Fields of the row besides what was said and shown."""
    return {"id": sample.id, **({"continues": True} if sample.continues else {})}


def _span(medium: Media) -> dict[str, float]:
    span = {"start": medium.start, "end": medium.end}
    return {name: time for name, time in span.items() if time is not None}


def _place(sample: Sample, folder: Path) -> Place:
    return Place(source=sample.source, row=sample.row, root=MediaRoot(folder, follow_links=True))


class _JsonWriter:
    """``data.json`` with rows of LLaVA, or ``data.jsonl`` with messages; their media beside it.

    Args:
        folder: the export's folder.
        to: which of them.
        keep_root: name the media where they are, relative to this media root, or by their
            addresses; None copies them.
    """

    def __init__(self, folder: Path, to: ExportFormat, keep_root: Path | str | None) -> None:
        self._folder = folder
        self._keep_root = keep_root
        self._count = 0
        if to == "llava":
            self._row, self._read, self._name = llava_row, llava.to_sample, "LLaVA JSON"
            self._before, self._between, self._end = "[\n", ",\n", "\n]\n"
        else:
            self._row, self._read, self._name = messages_row, messages.to_sample, "messages"
            self._before, self._between, self._end = "", "\n", "\n"
        self._stream = (folder / _NAMES[to]).open("w", encoding="utf-8")

    def write(self, sample: Sample) -> None:
        trial = self._row(sample, ["m"] * len(sample.media))
        check_same(sample, self._read(trial, _place(sample, self._folder)), self._name)
        row = self._row(sample, [self._add(medium) for medium in sample.media])
        self._stream.write(self._before + json.dumps(row))
        self._before = self._between

    def _add(self, media: Media) -> str:
        """The path of a medium relative to the export's media root; DataError if it has none."""
        where = media.path or f"<{media.kind} bytes>"
        if self._keep_root is not None:
            if media.data is not None:
                raise DataError(where, "has no file of its own", "export without --keep-paths")
            if is_url(where):
                return where
            return os.path.relpath(where, self._keep_root)
        folder = f"{FOLDER}/{self._count // _FILES_PER_FOLDER:05d}"
        name = f"{folder}/{self._count % _FILES_PER_FOLDER:03d}{media_suffix(media)}"
        self._count += 1
        (self._folder / folder).mkdir(parents=True, exist_ok=True)
        target = self._folder / name
        try:
            media = fetched(media)
            if media.data is not None:
                target.write_bytes(media.data)
            elif Path(where).is_dir():
                shutil.copytree(where, target)
            else:
                shutil.copyfile(where, target)
        except FileNotFoundError as error:
            raise DataError(where, "no such file", "fix the path or the media root") from error
        return name

    def close(self) -> None:
        self._stream.write(self._end)
        self._stream.close()


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
        read = webdataset.READER.to_sample(row, _place(sample, self._folder))
        check_same(sample, read, "WebDataset")
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
