"""Writes folders atomically: temporary name, sync, manifest with SHA-256 per file, rename.

A folder is written under a temporary name that starts with ``.tmp-``, synced, listed in its
manifest.json with sizes and SHA-256, and then renamed. A previous folder of that name is renamed to
``.old-...`` before and deleted afterwards; if the process is killed in between,
:func:`recover_folders` restores it.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from coat_data.saved_files import sync
from coat_vlm.checkpoint.folder_writer import FolderWriter, name_failed_file
from coat_vlm.checkpoint.manifest import Entry, write_manifest
from coat_vlm.distributed import World

_TEMPORARY = ".tmp-"
_OLD = ".old-"

Check = Callable[[], None]
"""Raises an exception if this process may no longer write, as after the loss of a lock."""


def write_folder(
    target: Path, world: World, write: Callable[[Path], None], check: Check | None = None
) -> None:
    """Write a folder on the main process, and replace ``target`` with it atomically.

    If writing fails or a process is killed at any time, an existing ``target`` stays unchanged (see
    :func:`recover_folders`).

    Args:
        target: the folder.
        world: the processes of the run; all must call this, and all raise an error if it failed.
        write: writes the files into the given folder; called on the main process only.
        check: called before writing and before the rename.

    Raises:
        OSError: the folder could not be written, for example because the disk is full.
    """

    def write_alone() -> None:
        if check is not None:
            check()
        temporary = make_temporary(target)
        try:
            writer = FolderWriter(temporary)
            try:
                write(temporary)
                writer.add_written()
            except Exception as error:
                raise name_failed_file(error, temporary) from error
            writer.sync_folders()
            commit_folder(temporary, target, writer.entries, check)
        except (OSError, RuntimeError, SafetensorError) as error:
            # Some writers raise RuntimeError if the disk is full.
            raise save_error(target, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # made here, and renamed after success

    world.run_on_rank0(write_alone)


def save_error(target: Path, reason: object) -> OSError:
    """Return the error of a folder that could not be written."""
    return OSError(
        f"{target} could not be saved: {reason}; free disk space or write elsewhere; earlier "
        "checkpoints are unchanged, and --resume auto continues from the last one"
    )


def make_temporary(target: Path) -> Path:
    """Create an empty folder beside ``target``, of a name that no other process uses.

    Raises:
        OSError: the folder could not be created.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY}{target.name}.{secrets.token_hex(4)}")
        temporary.mkdir()
    except OSError as error:
        raise save_error(target, error) from error
    return temporary


def commit_folder(
    temporary: Path, target: Path, entries: Mapping[str, Entry], check: Check | None = None
) -> None:
    """Write the manifest of a folder whose files are synced, and rename the folder to ``target``.

    Args:
        temporary: the folder; see :func:`make_temporary`.
        target: its new name; an existing folder is replaced.
        entries: the files for the manifest.
        check: called before the rename.
    """
    write_manifest(temporary, entries)
    sync(temporary)
    if check is not None:
        check()
    if not target.exists():
        temporary.rename(target)
    else:
        old = target.with_name(f"{_OLD}{target.name}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        sync(target.parent)
        shutil.rmtree(old)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read the value of a JSON file; ValueError names a damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of text that is not UTF-8
        raise ValueError(f"{path} is damaged: {error}; restore the file") from error


def remove_folder(folder: Path) -> None:
    """Delete a folder; a killed process leaves no partial folder under this name."""
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary)


def recover_folders(parent: Path) -> None:
    """Clean up after killed processes in ``parent``; call on one process before reading.

    Deletes partially written and partially deleted folders and files, and restores a folder that
    was renamed for a replacement that was not completed.
    """
    for old in parent.glob(f"{_OLD}*"):
        target = old.with_name(old.name.removeprefix(_OLD))
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for temporary in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(temporary)
    for file in parent.glob(".*.tmp"):
        file.unlink()
