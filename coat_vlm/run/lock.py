"""The lock of a run folder or an output folder, which rank 0 holds for all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coat_data.folder_lock import LIMIT_S, FolderLock, LockError, hold_lock
from coat_vlm.distributed import ALONE, World

LOCK = ".lock"
"""Name of the lock in a folder."""


@contextmanager
def lock_folder(
    path: Path, purpose: str, world: World = ALONE, *, limit_s: float = LIMIT_S
) -> Iterator[FolderLock]:
    """Hold a lock inside this context; all ranks call this, rank 0 takes the lock.

    See :func:`coat_data.folder_lock.hold_lock` for arguments and errors; if rank 0 has an error,
    the other ranks raise LockError.
    """
    with ExitStack() as stack:
        lock, problem, failure = FolderLock(path, ""), None, None
        if world.is_main:
            try:
                lock = stack.enter_context(hold_lock(path, purpose, limit_s=limit_s))
            except (LockError, OSError) as error:
                failure, problem = error, f"{error}"
        problem, token = world.gather((problem, lock.token))[0]
        if problem is not None:
            raise failure or LockError(problem)
        yield lock if world.is_main else FolderLock(path, token)
