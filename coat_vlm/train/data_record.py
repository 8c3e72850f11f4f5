"""Records the data with which a stage started (``sources.json``), to find changes at a resume.

The order of samples depends on names, selections, weights and numbers of rows. The samples
themselves are represented by sizes and SHA-256 of the sources' files, and of
:data:`SAMPLED_ROWS` rows with their media. Files above :data:`WHOLE_BYTES` are represented by
evenly spaced blocks. Modification times are not compared, because they differ in a copied data set.
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
from coat_data.sample import DataError, Media, hide_secrets
from coat_data.saved_files import write_text
from coat_vlm.config import SourceConfig
from coat_vlm.distributed import World
from coat_vlm.train.tracking import Metrics, print_on_main

SAMPLED_ROWS = 16
"""Evenly spaced rows of each source that are hashed with their media."""
WHOLE_BYTES = 1 << 30
"""Files of a source are hashed as a whole up to this sum of sizes."""
_BLOCK_BYTES = 1 << 16
_BLOCKS = 4096
_MEDIA_BLOCKS = 64
"""Blocks that are hashed of a large image or video."""
_ROW_FILES = (
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".pkl"),
    *(".tar", ".gz", ".tgz", ".bz2", ".xz"),
)
"""Suffixes of files with rows; in a folder all others are taken for media."""
_COMPARED = ("name", "select", "repeat", "weight", "rows")

Record = list[dict[str, Any]]
"""An entry per source: :data:`_COMPARED`, ``files`` and ``samples``."""


class SourceRecord:
    """The ``sources.json`` of a stage, which rank 0 compares if the stage continues, and writes.

    ``compare``: whether the stage continues from a checkpoint.
    """

    def __init__(self, path: Path, world: World, *, compare: bool, allow_changed: bool) -> None:
        self._changes: list[str] = []
        self._path = path
        self._world = world
        self._compare = compare
        self._allow_changed = allow_changed
        self._record: Record = []

    def open(self, sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> None:
        """Describe the data and compare it; ValueError if it changed or cannot be read."""

        def describe() -> None:
            self._record = describe_sources(sources, datasets)
            self._changes = find_source_changes(self._path, self._record) if self._compare else []
            if self._changes and not self._allow_changed:
                raise ValueError(
                    f"the data differs from {self._path}, with which this run started: "
                    f"{'; '.join(self._changes)}; restore the lists and files of the sources, "
                    "continue with the changed data (--allow-changed-data), or start a new run in "
                    "another output_dir"
                )

        self._world.run_on_rank0(describe)

    def log_changes(self, metrics: Metrics, stage: str, step: int) -> None:
        """Print and log the allowed changes."""
        if self._changes:
            changed = "".join(f"\n  {change}" for change in self._changes)
            print_on_main(self._world, f"stage {stage} continues with changed data:{changed}")
            entry = {"kind": "resume", "stage": stage, "step": step}
            metrics.write({**entry, "changed_data": self._changes})

    def write(self) -> None:
        """Write the file, on the main process."""
        write_text(self._path, hide_secrets(json.dumps(self._record, indent=1)))


def describe_sources(sources: Sequence[SourceConfig], datasets: Sequence[Rows]) -> Record:
    """Return what determines the order of samples and their contents, for ``sources.json``.

    ``files`` maps names to size and SHA-256; ``samples`` is a list of row, place, and the hashes of
    its text and of its media. Paths above the files are left out, so that a data set may move.
    """
    return [
        {
            **{key: getattr(source, key) for key in _COMPARED if key != "rows"},
            "rows": len(dataset),
            "files": _describe_files([path for part in _parts(dataset) for path in part.paths]),
            "samples": _describe_samples(dataset),
        }
        for source, dataset in zip(sources, datasets, strict=True)
    ]


def find_source_changes(path: Path, record: Record) -> list[str]:
    """Compare with the saved record at ``path``, if there is one; return one text per change."""
    if not path.is_file():
        return []
    try:
        saved: Record = json.loads(path.read_text(encoding="utf-8"))
        before = {source["name"]: source for source in saved}
        return _compare(before, {source["name"]: source for source in record})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); it lists the data with which this run started: if the "
            "data is unchanged, delete the file and continue with --resume auto"
        ) from error


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
    for key in _COMPARED:
        if before[key] != after[key]:
            yield f"has {key} {after[key]!r}, had {before[key]!r}"
    old, new = before["files"], after["files"]
    for file in [*old, *new]:
        if (file in old) != (file in new):
            yield f"{'has a new' if file in new else 'misses its'} file {file}"
    for file in old.keys() & new.keys():
        if old[file]["bytes"] != new[file]["bytes"]:
            yield f"has a different {file}: {new[file]['bytes']} bytes, had {old[file]['bytes']}"
        elif old[file] != new[file]:
            yield f"has a different {file}: different content of the same size"
    rows = {sample["row"]: sample for sample in after["samples"]}
    for sample in before["samples"]:
        other = rows.get(sample["row"], sample)
        parts = [part for part in ("text", "media") if sample[part] != other[part]]
        if parts:
            yield f"has different {' and '.join(parts)} in {sample['where']}"


def _parts(dataset: Rows) -> Sequence[SampleDataset]:
    whole = dataset.dataset if isinstance(dataset, SelectedRows) else dataset
    return whole.sources() if isinstance(whole, SampleDataset) else ()


def _describe_files(paths: Sequence[Path]) -> dict[str, Any]:
    files = [
        file
        for path in paths
        for file in (_row_files(path) if path.is_dir() else [str(path)])
        if os.path.isfile(file)  # noqa: PTH113 - links may be broken
    ]
    if not files:
        return {}
    folder = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120
    sizes = {file: Path(file).stat().st_size for file in sorted(set(files))}
    blocks = None if sum(sizes.values()) <= WHOLE_BYTES else max(4, _BLOCKS // len(sizes))
    return {
        os.path.relpath(file, folder): {"bytes": size, "sha256": _hash_file(file, blocks)}
        for file, size in sizes.items()
    }


def _row_files(folder: Path) -> Iterator[str]:
    for base, _, names in os.walk(folder):
        yield from (os.path.join(base, name) for name in names if name.endswith(_ROW_FILES))  # noqa: PTH118


def _describe_samples(dataset: Rows) -> list[dict[str, Any]]:
    """Return row, place and hashes of evenly spaced rows; a bad row is described by its error."""
    samples = []
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
            turns += [("fields", [fields]) for turn in sample.turns if (fields := turn.fields())]
            turns += [("tools", [sample.tools])] if sample.tools else []
            turns += [("rejected", [("text", sample.rejected)])] if sample.rejected else []
            where, text = sample.where, _hash(json.dumps(turns).encode())
            media = _hash("".join(map(_hash_medium, sample.media)).encode())
        row = original_row(dataset, index)
        samples.append({"row": row, "where": where, "text": text, "media": media})
    return samples


def _hash_medium(medium: Media) -> str:
    """Return the hash of a local medium; for a remote one its URL."""
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
    return _hash_file(str(path), _MEDIA_BLOCKS)


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
