"""The manifest of a folder: size and SHA-256 of each file, as they were written.

``manifest.json`` also has the version of the format and the SHA-256 of its own content, so that a
damaged manifest is not mistaken for one of another version.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coat_data.saved_files import FORMAT_VERSION, check_version, write_text

MANIFEST = "manifest.json"
VERSION = 1
"""Format version of a folder: a checkpoint, a model or a tokenizer."""

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
