"""Folders that appear whole or not at all, with a manifest that tells whether they are whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from coat_vlm.train.world import World

MANIFEST = "manifest.json"


def write_folder(target: Path, world: World, write: Callable[[Path], None]) -> None:
    """Let all ranks write into a temporary folder, then rename it to ``target``.

    Every file is synced and listed in manifest.json with its size and SHA-256 before the rename; an
    earlier ``target`` is replaced only then. A failure on any rank leaves ``target`` as it was.

    Args:
        target: the folder; on a file system that all ranks see.
        world: the processes of the run.
        write: writes the files of this rank into the folder it is given.

    Raises:
        OSError: a rank could not write, because the disk is full, say.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    failure: Exception | None = None
    try:
        write(temporary)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into RuntimeError
        failure = error
    if not world.any(failure is not None) and world.is_main:
        try:
            _finish(temporary, target)
        except OSError as error:
            failure = error
    if world.any(failure is not None):
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        reason = failure or "another rank failed"
        raise OSError(
            f"{target} could not be saved: {reason}; free disk space or change output_dir, then "
            "continue with --resume auto (what was saved before is untouched)"
        ) from failure


def problem_with(folder: Path) -> str | None:
    """Why a folder is not whole, or None if it is: every file there with the size it had."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"its {MANIFEST} cannot be read"
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
    return None


def _finish(temporary: Path, target: Path) -> None:
    files = {}
    for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
        with path.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        entry = {"bytes": path.stat().st_size, "sha256": digest}
        files[path.relative_to(temporary).as_posix()] = entry
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    _sync(manifest)
    for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
        _sync(folder)
    old = target.with_name(f".old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
