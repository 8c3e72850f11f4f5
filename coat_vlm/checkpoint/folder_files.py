"""Writes the files of one process into a folder: hashed in memory, then synced to the disk.

The SHA-256 of a file is that of the bytes that were to be written, so that a file which the disk
truncates or zeroes does not match it.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from coat_data.saved_files import hash_file, sync
from coat_vlm.checkpoint.manifest import Entry, list_files

_CHUNK = 1 << 24

_DTYPES = {dtype: name for name, dtype in _TYPES.items()}
"""Names of dtypes in safetensors files."""


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
