"""Writes folders atomically: temporary name, sync, manifest with SHA-256 per file, rename.

An existing folder of the same name is first renamed to ``.old-...``; :func:`recover_folders`
restores it if the process is killed before the new one is there. :func:`write_folder` writes on
rank 0 only, :class:`FolderSave` with a thread of each rank: each lists its files, and the thread of
rank 0 waits for all lists and commits the folder. Threads use no collectives, since training does.
"""

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors import SafetensorError

from coat_data.saved_files import sync, write_text
from coat_vlm.checkpoint.manifest import Entry, FolderFiles, find_wrong_size, write_manifest
from coat_vlm.checkpoint.verify import WAIT_S
from coat_vlm.distributed import ALONE, World

logger = logging.getLogger(__name__)

COMMIT_S = 1800.0
"""Seconds that rank 0 waits for the other ranks when its own files are written."""
GRACE_S = 20.0
"""The same while this process ends after an error, when other ranks may already have ended."""

_TEMPORARY = ".tmp-"
_OLD = ".old-"

Check = Callable[[], None]
"""Raises an exception if this process may no longer write, as after the loss of a lock."""


def write_folder(
    target: Path, world: World, write: Callable[[Path], None], check: Check | None = None
) -> None:
    """Write a folder on rank 0, and replace ``target`` with it atomically.

    All ranks must call this, and all raise an error if it failed. An existing ``target`` stays
    unchanged at any failure or kill (:func:`recover_folders`). ``check`` is called before writing
    and before the rename. Raises OSError if the folder could not be written.
    """

    def write_files(files: FolderFiles) -> None:
        write(files.folder)
        files.add_written()

    def write_alone() -> None:
        if check is not None:
            check()
        save = FolderSave(make_temporary(target), target, ALONE, check)
        try:
            save.run(write_files)
        finally:
            shutil.rmtree(save.temporary, ignore_errors=True)
        # The tokenizers package raises a plain Exception.
        failed = isinstance(save.failure, OSError | RuntimeError | SafetensorError)
        if failed or type(save.failure) is Exception:
            raise save_error(target, save.failure) from save.failure
        if save.failure is not None:
            raise save.failure

    world.run_on_rank0(write_alone)


class FolderSave:
    """One folder that all ranks write: ``temporary`` (:func:`make_temporary`), then ``target``.

    ``check`` is called on rank 0 before the rename.
    """

    def __init__(
        self, temporary: Path, target: Path, world: World, check: Check | None = None
    ) -> None:
        self.temporary = temporary
        self.target = target
        self.failure: Exception | None = None  # of this rank
        self._world = world
        self._check = check
        self._deadline = float("inf")
        self._thread: Thread | None = None

    def run(
        self, write: Callable[[FolderFiles], None], finish: Callable[[], None] = lambda: None
    ) -> None:
        """Write this rank's files; on rank 0 then commit the folder and call ``finish``.

        Exceptions become :attr:`failure`.
        """
        try:
            files = FolderFiles(self.temporary)
            try:
                write(files)
                files.sync_folders()
            except Exception:  # of any kind: it is raised again
                files.delete_written()  # so that the report below fits on a full disk
                raise
            if self._world.is_main:
                self._commit(self._collect(files.entries))
                finish()
            else:
                self._report({"files": files.entries})
        except Exception as error:
            self.fail(error)

    def start(self, write: Callable[[FolderFiles], None], finish: Callable[[], None]) -> None:
        """Call :meth:`run` in a thread."""
        # The interpreter does not wait for a daemon: the process can end although a disk hangs.
        self._thread = Thread(target=self.run, args=(write, finish), name="checkpoint", daemon=True)
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Record that this rank failed, and tell rank 0."""
        self.failure = error
        if not self._world.is_main:
            try:
                self._report({"error": f"{error}"})
            except OSError as unreported:
                logger.warning("a failed save cannot be reported to rank 0: %s", unreported)

    def wait(self) -> None:
        """Wait until this rank has written its files; on rank 0, until the folder is complete."""
        if self._thread is not None:
            self._thread.join()

    def hurry(self) -> None:
        """Let rank 0 wait no longer than ``GRACE_S`` for the other ranks."""
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _report(self, content: dict[str, Any]) -> None:
        # Not synced: as soon as rank 0 sees the list, it may rename the folder.
        write_text(self._list_path(self._world.rank), json.dumps(content), durable=False)

    def _list_path(self, rank: int) -> Path:
        return self.temporary / f".written-{rank:05d}.json"

    def _collect(self, own: dict[str, Entry]) -> dict[str, Entry]:
        """Wait for the lists of all ranks, check that the files are there, and delete the lists."""
        self._deadline = min(self._deadline, time.monotonic() + COMMIT_S)
        entries = dict(own)
        for rank in range(1, self._world.size):
            path = self._list_path(rank)
            self._wait_until(path.is_file, f"rank {rank} has not written its files")
            content = json.loads(path.read_text(encoding="utf-8"))
            if "error" in content:
                raise OSError(f"rank {rank}: {content['error']}")
            written = {name: Entry(*entry) for name, entry in content["files"].items()}
            entries |= written
            self._deadline = max(self._deadline, time.monotonic() + WAIT_S)
            for name, entry in written.items():
                self._wait_until(
                    lambda name=name, entry=entry: (
                        find_wrong_size(self.temporary, name, entry) is None
                    ),
                    f"rank {rank} wrote {name}, but rank 0 does not see it with {entry.size} bytes",
                )
        for rank in range(1, self._world.size):
            self._list_path(rank).unlink()
        for name, entry in own.items():
            if wrong := find_wrong_size(self.temporary, name, entry):
                raise OSError(f"{wrong}, which were just written")
        return entries

    def _wait_until(self, ready: Callable[[], bool], otherwise: str) -> None:
        pause = 0.01
        while not ready():
            if time.monotonic() > self._deadline:
                raise OSError(f"{otherwise} in time")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            next(self.temporary.iterdir(), None)  # NFS compares its listing with the server's

    def _commit(self, entries: Mapping[str, Entry]) -> None:
        """Write the manifest of the folder, whose files are synced, and rename the folder."""
        target = self.target
        write_manifest(self.temporary, entries)
        sync(self.temporary)
        if self._check is not None:
            self._check()
        if not target.exists():
            self.temporary.rename(target)
        else:
            old = target.with_name(f"{_OLD}{target.name}")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            self.temporary.rename(target)
            sync(target.parent)
            shutil.rmtree(old)
        sync(target.parent)


def save_error(target: Path, reason: object) -> OSError:
    """Return the error of a folder that could not be written."""
    return OSError(
        f"{target} could not be saved: {reason}; free disk space or write elsewhere; earlier "
        "checkpoints are unchanged, and --resume auto continues from the last one"
    )


def make_temporary(target: Path) -> Path:
    """Create an empty folder next to ``target``, of a name that no other process uses."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY}{target.name}.{secrets.token_hex(4)}")
        temporary.mkdir()
    except OSError as error:
        raise save_error(target, error) from error
    return temporary


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

    Deletes partial folders and files, and restores a folder whose replacement was not completed.
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
