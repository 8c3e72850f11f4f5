"""The files of a folder and their manifest: the size and SHA-256 of each, as they were written.

A file is hashed in memory, then synced: one that the disk truncates or zeroes does not match.

``manifest.json`` also has the version of the format and the SHA-256 of its own content, so that a
damaged manifest is not mistaken for one of another version.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from coat_data.saved_files import FORMAT_VERSION, check_version, hash_file, sync, write_text

MANIFEST = "manifest.json"
VERSION = 1
"""Format version of a folder: a checkpoint, a model or a tokenizer."""

_CHUNK = 1 << 24

_DTYPES = {dtype: name for name, dtype in _TYPES.items()}
"""Names of dtypes in safetensors files."""

_CHECKSUM = "sha256"
_UNREADABLE = (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError)
"""Errors of reading a manifest any bit of which may have flipped."""


class DamagedError(ValueError):
    """A file of a folder is missing or is not as it was written."""


class Entry(NamedTuple):
    """A file of a folder."""

    size: int
    """Number of bytes."""
    sha256: str


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of a folder and sync it; ``entries`` by path relative to the folder."""
    files = {name: {"bytes": e.size, "sha256": e.sha256} for name, e in sorted(entries.items())}
    content: dict[str, Any] = {FORMAT_VERSION: VERSION, "files": files}
    write_text(folder / MANIFEST, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Read the files in the manifest of a folder.

    Raises DamagedError if it cannot be read, ValueError if it has another format version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if content.pop(_CHECKSUM) != _checksum(content):
            raise DamagedError(f"{MANIFEST} is damaged: its SHA-256 differs")
        check_version(content[FORMAT_VERSION], VERSION, str(path))
        files = content["files"].items()
        return {name: Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in files}
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error}") from error
    except _UNREADABLE as error:
        raise DamagedError(f"{MANIFEST} cannot be read") from error


def find_problem(folder: Path) -> str | None:
    """Return why a folder is incomplete, or None; compares only existence and sizes.

    Raises ValueError if the folder has another format version.
    """
    try:
        listed = read_manifest(folder)
    except DamagedError as error:
        return str(error)
    return next(filter(None, (find_wrong_size(folder, *item) for item in listed.items())), None)


def find_wrong_size(folder: Path, name: str, entry: Entry) -> str | None:
    """Return what is wrong with the size of a file, or None."""
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:  # a damaged name may have a null byte
        return f"{name} cannot be read: {error}"
    return None if size == entry.size else f"{name} has {size} bytes, not {entry.size}"


def list_files(folder: Path) -> list[str]:
    """Return the files below a folder, relative to it; for a folder that one process writes."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class FolderFiles:
    """Writes files into a folder, which is created, and records their sizes and SHA-256.

    ``entries`` are the files written so far, by path relative to the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._begun: list[str] = []
        folder.mkdir(exist_ok=True)

    def write(self, name: str, chunks: Iterable["bytes | memoryview"]) -> None:
        """Write a file of this path relative to the folder; OSError names the file."""
        path = self.folder / name
        digest, size = hashlib.sha256(), 0
        self._begun.append(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
                    size += len(chunk)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        self.entries[name] = Entry(size, digest.hexdigest())

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as a JSON file; see :meth:`write`."""
        self.write(name, [json.dumps(value, indent=1).encode()])

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file without a second copy of its tensors; see :meth:`write`."""
        self.write(name, _serialize(tensors))

    def add_written(self) -> None:
        """Sync and record all files in the folder, which a library wrote in this process."""
        for name in list_files(self.folder):
            path = self.folder / name
            sync(path)
            self.entries[name] = Entry(path.stat().st_size, hash_file(path))

    def sync_folders(self) -> None:
        """Sync the names of the written files."""
        for folder in {(self.folder / name).parent for name in self.entries} | {self.folder}:
            sync(folder)

    def delete_written(self) -> None:
        """Delete the files that this object wrote, also an incomplete one, to free their space."""
        for name in self._begun:
            (self.folder / name).unlink(missing_ok=True)


def _serialize(tensors: Mapping[str, Tensor]) -> Iterator["bytes | memoryview"]:
    """Yield the bytes of a safetensors file: length of the header, header, tensors."""
    # Large elements first, so that every tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    assert sys.byteorder == "little", "safetensors files are little-endian"
    for _, tensor in ordered:
        data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]
