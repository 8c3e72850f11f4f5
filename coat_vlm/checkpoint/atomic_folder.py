"""Atomic folders: written beside their place, synced, renamed; a manifest with SHA-256 per file.

A folder is written beside its place, under a name that starts with ``.tmp-``; synced; listed in its
manifest.json with sizes and SHA-256; and only then put in its place, in one step where the file
system can swap two folders. Where it cannot, the earlier folder is called ``.old-...`` for a
moment: :func:`settle` puts it back if the process was killed in that moment.
"""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_vlm.distributed import ALONE, World

MANIFEST = "manifest.json"

_TEMPORARY = ".tmp-"
_OLD = ".old-"
_CHUNK = 1 << 24
_Entry = dict[str, Any]
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def write_folder(target: Path, world: World, write: Callable[[Path], None]) -> None:
    """Let all ranks write into a temporary folder, then put it in the place of ``target``.

    A failure on any rank, or the death of any process at any moment, leaves an earlier ``target``
    as it was (see :func:`settle`).

    Args:
        target: the folder; on a file system that all ranks see.
        world: the processes of the run.
        write: writes the files of this rank into the folder it is given.

    Raises:
        OSError: a rank could not write, because the disk is full, say.
    """
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    failure: Exception | None = None
    entries: dict[str, _Entry] = {}
    for step in (
        lambda: _make_empty(temporary, world),
        lambda: write(temporary),
        lambda: entries.update(_sync_files(temporary, world)),
        lambda: _finish(temporary, target, world.gather(entries), world),
    ):
        try:
            step()
        except Exception as error:
            failure = error
        if world.any(failure is not None):
            break
    else:
        return
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    # Some writers turn a full disk into a RuntimeError.
    if failure is not None and not isinstance(failure, OSError | RuntimeError):
        raise failure
    reason = failure or "another rank failed"
    raise OSError(
        f"{target} could not be saved: {reason}; free disk space or write elsewhere; what was "
        "saved before is untouched, and training continues from it with --resume auto"
    ) from failure


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def remove_folder(folder: Path) -> None:
    """Delete a folder; killed on the way, nothing that looks like it is left under its name."""
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary)


def settle(parent: Path) -> None:
    """Clear up what a killed process left in ``parent``: for one process, before anything is read.

    Folders half written or half deleted go; one that was moved away for a new one that did not
    come is put back.
    """
    for old in parent.glob(f"{_OLD}*"):
        place = old.with_name(old.name.removeprefix(_OLD))
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
    for temporary in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(temporary)


def problem_with(folder: Path) -> str | None:
    """Why a folder is not whole, or None if it is: every file there with the size it had."""
    try:
        listed = _read_manifest(folder)
    except ValueError as error:
        return str(error)
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
    return None


def problem_inside(folder: Path, world: World = ALONE) -> str | None:
    """Like :func:`problem_with`, but reads every file and compares its SHA-256, too.

    Args:
        folder: the folder; on a file system that all ranks see.
        world: the processes that share the reading; all must call this, and all get the answer.
    """
    problem = problem_with(folder)
    if problem is None:
        listed = _read_manifest(folder)
        mine = list(listed)[world.rank :: world.size]
        total = sum(listed[name]["bytes"] for name in mine)
        with _bar(f"checking {folder.name}", total, world) as bar:
            for name in mine:
                try:
                    if _sha256(folder / name, bar) != listed[name]["sha256"]:
                        problem = f"{name} is damaged: its SHA-256 is not that of what was written"
                except OSError as error:
                    problem = f"{name} cannot be read: {error}"
    return next((found for found in world.gather(problem) if found is not None), None)


def _read_manifest(folder: Path) -> dict[str, _Entry]:
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"it has no {MANIFEST}")
    try:
        files = read_json(manifest)["files"]
        keys = ("bytes", "sha256")
        return {name: {key: entry[key] for key in keys} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # bits may flip anywhere
        raise ValueError(f"its {MANIFEST} cannot be read") from error


def _sync_files(temporary: Path, world: World) -> dict[str, _Entry]:
    """Sync this rank's share of the files; their entries in the manifest."""
    paths = sorted(path for path in temporary.rglob("*") if path.is_file())
    mine = paths[world.rank :: world.size]
    entries: dict[str, _Entry] = {}
    with _bar("syncing", sum(path.stat().st_size for path in mine), world) as bar:
        for path in mine:
            _sync(path)
            entry = {"bytes": path.stat().st_size, "sha256": _sha256(path, bar)}
            entries[path.relative_to(temporary).as_posix()] = entry
    return entries


def _make_empty(folder: Path, world: World) -> None:
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _finish(temporary: Path, target: Path, shares: list[dict[str, _Entry]], world: World) -> None:
    """Write the manifest, sync it and the folders, and put the new folder in its place."""
    if not world.is_main:
        return
    files = dict(sorted(item for share in shares for item in share.items()))
    write_json(temporary / MANIFEST, {"files": files})
    _sync(temporary / MANIFEST)
    for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
        _sync(folder)
    if not target.exists():
        temporary.rename(target)
    else:
        old = temporary  # what the swap leaves there
        if not _swap(temporary, target):
            old = target.with_name(f"{_OLD}{target.name}")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            temporary.rename(target)
        _sync(target.parent)
        shutil.rmtree(old)
    _sync(target.parent)


def _swap(a: Path, b: Path) -> bool:
    """Swap two folders in one step, with Linux's renameat2; False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(a), os.fsencode(b)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _sha256(path: Path, bar: "tqdm[Any]") -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _bar(title: str, total: int, world: World) -> "tqdm[Any]":
    """A progress bar in bytes, for what takes longer than two seconds."""
    return tqdm(
        desc=title,
        total=total,
        unit="B",
        unit_scale=True,
        delay=2.0,
        leave=False,
        disable=None if world.is_main else True,
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
