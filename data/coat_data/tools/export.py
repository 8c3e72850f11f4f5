"""Writes the samples of a source as LLaVA JSON or messages JSONL.

Every row is read back by the reader of its format before it is written: a sample that the format
cannot represent is left out and listed, never changed. Media are copied into a folder next to the
rows, or referenced at their present paths.
"""

import dataclasses
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from tqdm import tqdm

from coat_data.containers.media_files import IMAGE_FORMATS, VIDEO_SUFFIXES, image_suffixes
from coat_data.load.dataset import SampleDataset
from coat_data.media.remote_media import fetch_media
from coat_data.media.root import MediaRoot
from coat_data.readers import llava, messages
from coat_data.readers.preference import RESPONSE
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Media, Part, Role, Sample, Turn
from coat_data.tools.source import list_bad, media_bytes, new_folder

_Name = str | list[str]  # path of an image or video, or of each frame of a list

FOLDER = "media"
"""Name of the folder next to the exported rows."""

_FILES_PER_FOLDER = 1000


ExportFormat = Literal["llava", "messages"]
BAD_NAME = "left_out.jsonl"

_NAMES: Mapping[ExportFormat, str] = {"llava": "data.json", "messages": "data.jsonl"}

_SPEAKERS: Mapping[Role, str] = {"user": "human", "assistant": "gpt", "tool": "observation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """Result of an export."""

    rows: int
    left_out: int  # bad samples, and samples that the format cannot represent; see left_out.jsonl
    path: Path


def export(
    path: str | Path, out_dir: str | Path, to: ExportFormat, **options: Any
) -> ExportSummary:
    """Write every good sample of ``path``, and its media, to the new folder ``out_dir``."""
    dataset = SampleDataset(path, in_order=True, **options)
    rows = left_out = 0
    why = ""
    with new_folder(out_dir) as folder:
        with closing(_JsonWriter(folder, to)) as writer:
            for sample in tqdm(dataset.stream(), f"export {dataset.name}", len(dataset)):
                try:
                    if isinstance(sample, DataError):
                        raise sample
                    writer.write(sample)
                    rows += 1
                except DataError as error:
                    left_out += 1
                    list_bad(folder / BAD_NAME, [error])
                    why = why or str(error)
        if not rows:
            problem = f"no sample can be exported: {why or 'there are no rows'}"
            raise DataError(str(path), problem, "see coat-vlm data lint")
    return ExportSummary(rows=rows, left_out=left_out, path=Path(out_dir) / _NAMES[to])


def media_suffix(media: Media) -> str:
    """Return the extension of a media file's name: its own if it fits the kind, else detected."""
    own = Path(media.path or "").suffix.lower()
    if media.kind == "video":
        is_folder = media.data is None and Path(media.path or "").is_dir()
        known = own in VIDEO_SUFFIXES or own in image_suffixes()  # a GIF may be a video
        return "" if is_folder else own if known else ".mp4"
    if own in image_suffixes():
        return own
    try:
        with Image.open(io.BytesIO(media_bytes(media)), formats=IMAGE_FORMATS) as image:
            return f".{(image.format or 'img').lower()}"
    except Exception:  # Pillow raises many: an image that cannot be read is copied unchanged
        return ".img"


def llava_row(sample: Sample, names: Sequence[_Name]) -> dict[str, Any]:
    """Convert the sample to a row of LLaVA's JSON.

    ``names``: path of each image or video (of a list, of each frame), relative to the media root.
    """
    row = _head(sample)
    for kind in ("image", "video"):
        own = [
            {"path": name, **span} if (span := _span(medium)) or medium.frames else name
            for medium, name in zip(sample.media, names, strict=True)
            if medium.kind == kind
        ]
        if own:
            row[kind] = own[0] if len(own) == 1 else own
    row["conversations"] = []
    for turn in sample.turns:
        texts = [part.text if part.kind == "text" else f"<{part.kind}>" for part in turn.parts]
        message = {"from": _SPEAKERS.get(turn.role, "system"), "value": "".join(texts)}
        row["conversations"].append(message | turn.fields() | _loss(turn))
    return row


def messages_row(sample: Sample, names: Sequence[_Name]) -> dict[str, Any]:
    """Convert the sample to chat messages with content parts; ``names`` as in :func:`llava_row`."""
    waiting = iter(zip(sample.media, names, strict=True))
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
                continue
            medium, name = next(waiting)
            content.append({"type": part.kind, "path": name, **_span(medium)})
        messages.append({"role": turn.role, "content": content} | turn.fields() | _loss(turn))
    return {**_head(sample), "messages": messages}


def merge_texts(turns: Sequence[Turn]) -> list[Turn]:
    """Merge neighboring text parts, so that equal conversations have equal turns."""
    found: list[Turn] = []
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            if part.kind == "text" and parts and parts[-1].kind == "text":
                parts[-1] = Part("text", parts[-1].text + part.text)
            elif part.kind != "text" or part.text:
                parts.append(part)
        found.append(dataclasses.replace(turn, parts=tuple(parts)))
    return found


def check_same(sample: Sample, read: Sample, format_name: str) -> None:
    """Check that the row that was read back equals the sample."""

    def media(of: Sample) -> list[Media]:
        return [
            dataclasses.replace(medium, path=None, data=None, frames=("",) * len(medium.frames))
            for medium in of.media
        ]

    same = merge_texts(sample.turns) == merge_texts(read.turns) and media(sample) == media(read)
    other = any(getattr(sample, n) != getattr(read, n) for n in ("continues", "tools", "rejected"))
    if not same or other:
        raise DataError(
            sample.where,
            f"cannot be written as {format_name}: it would be read back as a different "
            "conversation",
            "export it as messages, which can represent every sample",
        )


def _head(sample: Sample) -> dict[str, Any]:
    head: dict[str, Any] = {"id": sample.id}
    head |= {"continues": True} if sample.continues else {}
    head |= {"tools": json.dumps(sample.tools)} if sample.tools else {}
    return head | ({RESPONSE: sample.rejected} if sample.rejected else {})


def _loss(turn: Turn) -> dict[str, int]:
    return {} if turn.supervised else {"weight": 0}


def _span(medium: Media) -> dict[str, float]:
    span = {"start": medium.start, "end": medium.end, "fps": medium.fps}
    return {name: time for name, time in span.items() if time is not None}


class _JsonWriter:
    def __init__(self, folder: Path, to: ExportFormat) -> None:
        self._folder = folder
        self._count = 0
        if to == "llava":
            self._row, self._read, self._name = llava_row, llava.READER.read, "LLaVA JSON"
            self._before, self._between, self._end = "[\n", ",\n", "\n]\n"
        else:
            self._row, self._read, self._name = messages_row, messages.READER.read, "messages"
            self._before, self._between, self._end = "", "\n", "\n"
        self._stream = (folder / _NAMES[to]).open("w", encoding="utf-8")

    def write(self, sample: Sample) -> None:
        trial = self._row(sample, [["m"] * len(one.frames) or "m" for one in sample.media])
        root = MediaRoot(self._folder, follow_links=True)
        place = Place(source=sample.source, row=sample.row, root=root)
        check_same(sample, self._read(trial, place), self._name)
        names: list[_Name] = [
            [self._add(frame) for frame in medium.frame_images()] or self._add(medium)
            for medium in sample.media
        ]
        self._stream.write(self._before + json.dumps(self._row(sample, names)))
        self._before = self._between

    def _add(self, media: Media) -> str:
        where = media.name
        folder = f"{FOLDER}/{self._count // _FILES_PER_FOLDER:05d}"
        name = f"{folder}/{self._count % _FILES_PER_FOLDER:03d}{media_suffix(media)}"
        self._count += 1
        (self._folder / folder).mkdir(parents=True, exist_ok=True)
        target = self._folder / name
        try:
            media = fetch_media(media)
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
