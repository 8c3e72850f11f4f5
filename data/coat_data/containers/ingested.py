"""The folder that :func:`coat_data.tools.ingest.ingest` writes: Parquet shards and a manifest.

``part-00000.parquet``, ... hold one sample per row in the columns of :func:`features`;
``manifest.json`` is a :class:`Manifest`. Media paths are stored relative to the media root where
they lie under it, so that the folder can be opened with another root.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_data.containers.remote_file import is_url
from coat_data.containers.rows import Rows
from coat_data.containers.table import open_parquet
from coat_data.sample import DataError, Sample

if TYPE_CHECKING:
    from datasets import Features

FORMAT = "coat-vlm-samples"
VERSION = 2
MANIFEST_NAME = "manifest.json"
BAD_SAMPLES_NAME = "bad_samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One Parquet file of an ingested folder."""

    name: str
    rows: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents and origin of an ingested folder."""

    rows: int
    shards: tuple[Shard, ...]
    bad_samples: int
    """Rows of the source that were left out; ``bad_samples.jsonl`` lists them."""
    source: str
    """Absolute path of the file that was ingested."""
    media_root: str
    """Absolute folder, or URL, that relative media paths start from."""

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        text = json.dumps(content, indent=2) + "\n"
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of ``folder``; DataError if it is not of this version."""
        path = folder / MANIFEST_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = (content.pop("format"), content.pop("version"))
            if found == (FORMAT, VERSION):
                shards = tuple(Shard(**shard) for shard in content.pop("shards"))
                return cls(shards=shards, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(str(path), f"is not a manifest: {error}", "ingest again") from error
        problem = f"is format {found[0]!r} version {found[1]!r}, not {FORMAT!r} version {VERSION}"
        raise DataError(str(path), problem, "ingest again with this version of coat-vlm")


def features() -> "Features":
    """Return the columns of a shard as a ``datasets.Features``."""
    from datasets import Features, List, Value

    name, text, number, flag = map(Value, ("string", "large_string", "float64", "bool"))
    part = {"kind": name, "text": text, "tagged": text}
    medium = {"kind": name, "path": name, "data": Value("large_binary"), "start": number}
    medium |= {"end": number, "frames": List(name), "fps": number}
    return Features(
        {
            "id": name,
            "row": Value("int64"),
            "turns": List({"role": name, "parts": List(part), "supervised": flag}),
            "fields": text,  # JSON: Turn.fields of each turn
            "media": List(medium),
            "continues": flag,
            "tools": text,  # JSON
            "rejected": text,
            "rejected_tagged": text,
        }
    )


def to_record(sample: Sample, media_root: Path | str) -> dict[str, Any]:
    """Return a row of a shard; media paths below ``media_root`` become relative to it."""
    media = [
        {name: getattr(medium, name) for name in ("kind", "data", "start", "end", "fps")}
        | {
            "path": _relative(medium.path, media_root),
            "frames": [_relative(frame, media_root) for frame in medium.frames],
        }
        for medium in sample.media
    ]
    names = ("id", "row", "continues", "rejected", "rejected_tagged")
    return {name: getattr(sample, name) for name in names} | {
        "turns": [dataclasses.asdict(turn) for turn in sample.turns],
        "fields": json.dumps([turn.fields() for turn in sample.turns]),
        "media": media,
        "tools": json.dumps(sample.tools),
    }


def _relative(path: str | None, media_root: Path | str) -> str:
    if path is not None and is_url(path):
        return path
    target = Path(path or "")
    return str(target.relative_to(media_root) if target.is_relative_to(media_root) else target)


class Record(dict[str, Any]):
    """A row of a shard, in the columns of :func:`coat_data.containers.ingested.features`."""


class ShardRows(Rows):
    """The records of all shards, memory mapped; DataError if the manifest says otherwise."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        self._source = manifest.source
        root = manifest.media_root
        self.media_root = root if is_url(root) else Path(root)
        for shard in manifest.shards:
            path = folder / shard.name
            size = path.stat().st_size if path.is_file() else 0
            if size != shard.size:
                problem = f"this shard has {size} bytes, the manifest says {shard.size}"
                raise DataError(str(path), problem, "copy the whole folder again, or ingest again")
        self._table = open_parquet(
            [folder / shard.name for shard in manifest.shards], features().arrow_schema
        )
        if not len(self._table) == manifest.rows == sum(shard.rows for shard in manifest.shards):
            problem = f"the shards hold {len(self._table)} rows, the manifest says {manifest.rows}"
            raise DataError(str(folder), problem, "ingest again")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        return Record(self._table[index])

    def place(self, index: int) -> tuple[str, int]:
        """Return the file that was ingested, and ``index``; the record has its row there."""
        return self._source, index
