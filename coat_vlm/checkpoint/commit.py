"""Writes a folder with all ranks, each in a thread, and renames it when all files are there.

The thread of each rank hashes, writes and syncs its files, and then lists them in a file of the
temporary folder. The thread of rank 0 waits for all lists, checks that the listed files are there,
writes the manifest and renames the folder. Threads use no collectives, since training does.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from coat_vlm.checkpoint.atomic_folder import Check, commit_folder
from coat_vlm.checkpoint.folder_writer import CancelledError, FolderWriter
from coat_vlm.checkpoint.manifest import Entry, find_wrong_size
from coat_vlm.checkpoint.verify import WAIT_S
from coat_vlm.distributed import World

logger = logging.getLogger(__name__)

COMMIT_S = 1800.0
"""Seconds that rank 0 waits for the other ranks when its own files are written."""
GRACE_S = 20.0
"""The same while this process ends after an error, when other ranks may already have ended."""


class FolderSave:
    """One folder that all ranks write.

    Args:
        temporary: an empty folder that rank 0 made; see
            :func:`coat_vlm.checkpoint.atomic_folder.make_temporary`.
        target: its name when it is complete.
        world: the processes of the run.
        check: called on rank 0 before the rename.

    Attributes:
        failure: why this rank failed, after :meth:`wait`.
    """

    def __init__(
        self, temporary: Path, target: Path, world: World, check: Check | None = None
    ) -> None:
        self.temporary = temporary
        self.target = target
        self.failure: Exception | None = None
        self._world = world
        self._check = check
        self._cancelled = Event()
        self._deadline = float("inf")
        self._thread: Thread | None = None

    def run(self, write: Callable[[FolderWriter], None], finish: Callable[[], None]) -> None:
        """Write this rank's files; on rank 0 then commit the folder and call ``finish``.

        Exceptions become :attr:`failure`.
        """
        try:
            writer = FolderWriter(self.temporary, self._cancelled)
            try:
                write(writer)
                writer.sync_folders()
            except Exception:  # of any kind: it is raised again
                writer.delete_written()  # so that the report below fits on a full disk
                raise
            if self._world.is_main:
                entries = self._collect(writer.entries)
                commit_folder(self.temporary, self.target, entries, self._check)
                finish()
            else:
                files = {name: [*entry] for name, entry in writer.entries.items()}
                self._report({"files": files})
        except Exception as error:
            self.fail(error)

    def start(self, write: Callable[[FolderWriter], None], finish: Callable[[], None]) -> None:
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
                logger.warning("rank 0 cannot be told of a failed save: %s", unreported)

    def wait(self) -> None:
        """Wait until this rank has written its files; on rank 0, until the folder is complete."""
        if self._thread is not None:
            self._thread.join()

    def hurry(self) -> None:
        """Let rank 0 wait no longer than ``GRACE_S`` for the other ranks."""
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def cancel(self) -> None:
        """Stop writing as soon as possible; the folder is not completed."""
        self._cancelled.set()

    def _report(self, content: dict[str, Any]) -> None:
        path = self._list_path(self._world.rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(path)  # last: as soon as rank 0 sees the list, it may rename the folder

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
            if twice := written.keys() & entries.keys():
                raise AssertionError(f"two ranks wrote {', '.join(twice)}")
            entries |= written
            self._deadline = max(self._deadline, time.monotonic() + WAIT_S)
            for name, entry in written.items():
                self._wait_until(
                    lambda name=name, entry=entry: not self._find_wrong(name, entry),
                    f"rank {rank} wrote {name}, and rank 0 does not see it with {entry.size} bytes",
                )
        for rank in range(1, self._world.size):
            self._list_path(rank).unlink()
        for name, entry in own.items():
            if wrong := self._find_wrong(name, entry):
                raise OSError(f"{wrong}, which were just written")
        return entries

    def _find_wrong(self, name: str, entry: Entry) -> str | None:
        return find_wrong_size(self.temporary, name, entry)

    def _wait_until(self, ready: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition on the files of another rank."""
        pause = 0.01
        while not ready():
            if self._cancelled.is_set():
                raise CancelledError(f"{self.target} was not completed")
            if time.monotonic() > self._deadline:
                raise OSError(f"{otherwise} in time")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            next(self.temporary.iterdir(), None)  # NFS compares its listing with the server's
