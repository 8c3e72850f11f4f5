"""Records the data with which a stage started (``sources.json``), to find changes at a resume.

The order of samples depends on names, selections, weights and numbers of rows. The samples
themselves are represented by sizes and SHA-256 of the sources' files, and of
:data:`SAMPLED_ROWS` rows with their media. Files above :data:`WHOLE_BYTES` are represented by
evenly spaced blocks. Modification times are recorded but not compared, because a copied data set
has others.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from coat_data.containers.remote_file import is_url
from coat_data.load.dataset import SampleDataset
from coat_data.mixture.selection import Rows, SelectedRows, original_row
from coat_data.sample import DataError, Media
from coat_data.saved_files import write_text
from coat_vlm.config import SourceConfig
from coat_vlm.distributed import World
from coat_vlm.train.tracking import print_on_main

SAMPLED_ROWS = 16
"""Evenly spaced rows of each source that are hashed with their media."""
WHOLE_BYTES = 1 << 30
"""Files of a source are hashed as a whole up to this sum of sizes."""
_BLOCK_BYTES = 1 << 16
_BLOCKS = 4096
_MEDIA_BYTES = 1 << 26
"""A larger medium is hashed in blocks."""
_MEDIA_BLOCKS = 64
_ROW_FILES = (
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".pkl"),
    *(".tar", ".gz", ".tgz", ".bz2", ".xz"),
)
"""Suffixes of files with rows; in a folder all others are taken for media."""
_COMPARED = ("name", "select", "repeat", "weight")

Record = list[dict[str, Any]]
"""One entry per source."""


class SourceRecord:
    """The ``sources.json`` of a stage: compared when the stage continues, then written.

    Rank 0 reads the data and decides for all. ``changes`` is what changed, if that is allowed.

    Args:
        compare: whether the stage continues from a checkpoint.
        allow_changed: continue although the data changed.
    """

    def __init__(self, path: Path, world: World, *, compare: bool, allow_changed: bool) -> None:
        self.changes: list[str] = []
        self._path = path
        self._world = world
        self._compare = compare
        self._allow_changed = allow_changed
        self._contents: Record = []
        self._record: Record = []

    def open(self, sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> None:
        """Read the contents and compare them, before the rows are measured or split.

        Raises:
            ValueError: the data changed, or cannot be read.
        """

        def describe() -> None:
            self._contents = describe_contents(datasets)
            self._build(sources, [None] * len(sources))

        self._world.run_on_rank0(describe)

    def finish(self, sources: Sequence[SourceConfig], rows: Sequence[int]) -> None:
        """Compare the numbers of rows that training uses; raises as :meth:`open` does."""
        self._world.run_on_rank0(lambda: self._build(sources, rows))

    def entries(self, stage: str, step: int) -> list[dict[str, Any]]:
        """Print the allowed changes, and return an entry for metrics.jsonl if there are any."""
        if not self.changes:
            return []
        changed = "".join(f"\n  {change}" for change in self.changes)
        print_on_main(self._world, f"stage {stage} continues with changed data:{changed}")
        return [{"kind": "resume", "stage": stage, "step": step, "changed_data": self.changes}]

    def write(self) -> None:
        """Write the file, on the main process."""
        write_text(self._path, json.dumps(self._record, indent=1))

    def _build(self, sources: Sequence[SourceConfig], rows: Sequence[int | None]) -> None:
        self._record = build_source_record(sources, rows, self._contents)
        if self._compare and self._allow_changed:
            self.changes = find_source_changes(self._path, self._record)
        elif self._compare:
            check_source_record(self._path, self._record)


def describe_contents(datasets: Sequence[Rows]) -> Record:
    """Return ``files`` and ``samples`` of each source: what they hold, for its record.

    ``files`` maps names to size, modification time and SHA-256; ``samples``
    is a list of row, place, and the hashes of its text and of its media. Paths above the files are
    left out, so that a data set may move.
    """
    contents: Record = []
    for dataset in datasets:
        paths = [path for part in _parts(dataset) for path in part.paths]
        contents.append({"files": _describe_files(paths), "samples": _describe_samples(dataset)})
    return contents


def build_source_record(
    sources: Sequence[SourceConfig], rows: Sequence[int | None], contents: Record
) -> Record:
    """Return what determines the order of samples and their contents, for ``sources.json``.

    Args:
        rows: selected rows of each source; None if not known yet.
    """
    return [
        {**{key: getattr(source, key) for key in _COMPARED}, "rows": number, **content}
        for source, number, content in zip(sources, rows, contents, strict=True)
    ]


def find_source_changes(path: Path, record: Record) -> list[str]:
    """Compare with the saved record at ``path``, if there is one; return one text per change."""
    if not path.is_file():
        return []
    try:
        saved: Record = json.loads(path.read_text(encoding="utf-8"))
        before = {source["name"]: source for source in saved}
        changes = _compare(before, {source["name"]: source for source in record})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); it lists the data with which this run started: if the "
            "data is unchanged, delete the file and continue with --resume auto"
        ) from error
    return changes


def check_source_record(path: Path, record: Record) -> None:
    """Raise ValueError if the data changed; see :func:`find_source_changes`."""
    changes = find_source_changes(path, record)
    if changes:
        raise ValueError(
            f"the data differs from {path}, with which this run started: "
            f"{'; '.join(changes)}; restore the lists and files of the sources, continue with the "
            "changed data (--allow-changed-data), or start a new run in another output_dir"
        )


def _compare(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    changes = [
        f"{name} is {'new' if name in after else 'missing'}"
        for name in [*before, *after]
        if (name in before) != (name in after)
    ]
    for name, source in before.items():
        if name in after:
            changes += [f"{name} {change}" for change in _compare_source(source, after[name])]
    if not changes and list(before) != list(after):
        changes.append("the order of the sources")
    return changes


def _compare_source(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in (*_COMPARED, "rows"):
        if before[key] != after[key] and (key != "rows" or after[key] is not None):
            yield f"has {key} {after[key]!r}, had {before[key]!r}"
    old, new = before["files"], after["files"]
    for file in [*old, *new]:
        if (file in old) != (file in new):
            yield f"{'has a new' if file in new else 'misses its'} file {file}"
    for file in old.keys() & new.keys():
        found = _compare_file(old[file], new[file])
        if found:
            yield f"has another {file}: {found}"
    rows = {sample["row"]: sample for sample in after["samples"]}
    for sample in before["samples"]:
        other = rows.get(sample["row"], sample)
        parts = [part for part in ("text", "media") if sample[part] != other[part]]
        if parts:
            yield f"has another {' and '.join(parts)} in {sample['where']}"


def _compare_file(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    if before.get("bytes") != after.get("bytes"):
        return f"{after.get('bytes')} bytes, had {before.get('bytes')}"
    same = before.get("sha256") == after.get("sha256")
    return None if same else "another content of the same size"


def _parts(dataset: Rows) -> Sequence[SampleDataset]:
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    return whole.sources() if isinstance(whole, SampleDataset) else ()


def _describe_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Return size, modification time and SHA-256 of the files with rows, by relative path."""
    files = [
        file
        for path in paths
        for file in (_row_files(path) if path.is_dir() else [str(path)])
        if os.path.isfile(file)  # noqa: PTH113 - links may be broken
    ]
    if not files:
        return {}
    folder = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120
    stats = {file: Path(file).stat() for file in sorted(set(files))}
    whole = sum(stat.st_size for stat in stats.values()) <= WHOLE_BYTES
    blocks = None if whole else max(4, _BLOCKS // len(stats))
    return {
        os.path.relpath(file, folder): {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": _hash_file(file, blocks),
        }
        for file, stat in stats.items()
    }


def _row_files(folder: Path) -> Iterator[str]:
    for base, _, names in os.walk(folder):
        yield from (os.path.join(base, name) for name in names if name.endswith(_ROW_FILES))  # noqa: PTH118


def _describe_samples(dataset: Rows) -> list[dict[str, Any]]:
    """Return row, place and hashes of evenly spaced rows; a bad row is described by its error."""
    found = []
    for index in np.unique(np.linspace(0, len(dataset) - 1, SAMPLED_ROWS).astype(int)).tolist():
        try:
            sample = dataset[index]
        except DataError as error:
            where, text, media = error.where, "bad row", ""
        else:
            turns = [
                (turn.role, [(part.kind, part.text) for part in turn.parts])
                for turn in sample.turns
            ]
            turns += [("rejected", [("text", sample.rejected)])] if sample.rejected else []
            where, text = sample.where, _hash(json.dumps(turns).encode())
            media = _hash("".join(map(_hash_medium, sample.media)).encode())
        row = original_row(dataset, index)
        found.append({"row": row, "where": where, "text": text, "media": media})
    return found


def _hash_medium(medium: Media) -> str:
    """Return the hash of a local medium; for a remote one its address."""
    if medium.data is not None:
        return _hash(medium.data)
    path = cast(str, medium.path)
    if is_url(path):
        return path
    if Path(path).is_dir():  # the frames of a video
        names = sorted(os.listdir(path))  # noqa: PTH208
        chosen = names[:: max(1, len(names) // SAMPLED_ROWS)]
        return "".join([_hash("/".join(names).encode()), *(_hash_image(path, n) for n in chosen)])
    return _hash_image(path)


def _hash_image(*parts: str) -> str:
    path = Path(*parts)
    if not path.is_file():
        return "no file"
    return _hash_file(str(path), None if path.stat().st_size <= _MEDIA_BYTES else _MEDIA_BLOCKS)


def _hash_file(path: str, blocks: int | None) -> str:
    """Return the SHA-256 of a file, or of this many evenly spaced blocks of it."""
    with open(path, "rb") as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        if blocks is None or size <= blocks * _BLOCK_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for start in np.linspace(0, size - _BLOCK_BYTES, blocks).astype(np.int64).tolist():
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
        return digest.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
