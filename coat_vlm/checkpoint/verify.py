"""Checks that the files of a folder are as they were written, and that all ranks see the same.

Rank 0 decides what is in a folder. On a network file system another rank may see an earlier listing
or earlier content for some time (on NFS up to a minute), so it waits; then it is an error that says
which rank misses which file.
"""

import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_data.saved_files import hash_file
from coat_vlm.checkpoint.manifest import (
    MANIFEST,
    Entry,
    find_problem,
    find_wrong_size,
    read_manifest,
)
from coat_vlm.distributed import ALONE, World

WAIT_S = 120.0
"""Seconds to wait for a file that rank 0 sees; NFS refreshes a listing after 60 by default."""

_CHUNK = 1 << 24


def find_damage(folder: Path, world: World = ALONE, wait_s: float | None = None) -> str | None:
    """Return why a folder is incomplete or damaged, or None; reads and compares every file.

    All ranks share the work and get the same result. Raises ValueError if a rank does not see the
    files that rank 0 sees after ``wait_s``, or the folder has another format version.
    """

    def look() -> tuple[str | None, str, dict[str, Entry]]:
        problem = find_problem(folder)
        return (problem, "", {}) if problem else (None, *_read_manifest(folder))

    problem, digest, entries = world.run_on_rank0(look)
    if problem is not None:
        return problem
    raise_if_different(
        world,
        lambda: _find_unseen(folder, digest, entries),
        WAIT_S if wait_s is None else wait_s,
    )
    found = world.gather(_find_damaged_file(folder, entries, world))
    name = next((name for name, _ in filter(None, found)), None)
    if name is None:
        return None

    def read_again() -> str | None:
        return _check_file(folder, name, entries[name])

    damage = world.run_on_rank0(read_again)
    if damage is None:
        rank = next(rank for rank, problem in enumerate(found) if problem is not None)
        raise ValueError(
            f"rank {rank} reads other bytes in {folder / name} than rank 0; make sure that the "
            "folder is one file system, shared by all nodes"
        )
    return damage


def read_same(path: Path, sha256: str, world: World, wait_s: float | None = None) -> bytes:
    """Read a file that rank 0 has written or chosen, with the same content on every rank.

    Raises:
        ValueError: a rank does not see the file with this content.
    """
    content = b""

    def find_unseen() -> str | None:
        nonlocal content
        try:
            content = path.read_bytes()
        except OSError as error:
            return f"{path}: {error.strerror}"
        return None if hashlib.sha256(content).hexdigest() == sha256 else f"{path} has other bytes"

    raise_if_different(world, find_unseen, WAIT_S if wait_s is None else wait_s)
    return content


def raise_if_different(world: World, find_unseen: Callable[[], str | None], wait_s: float) -> None:
    """Wait on every rank until ``find_unseen`` returns None: it sees what rank 0 sees.

    Raises:
        ValueError: on every rank, if one of them still misses something.
    """
    deadline = time.monotonic() + wait_s
    while (unseen := find_unseen()) is not None and time.monotonic() < deadline:
        time.sleep(min(1.0, wait_s / 10))
    unseen = None if unseen is None else f"{unseen} (host {socket.gethostname()})"
    for rank, missing in enumerate(world.gather(unseen)):
        if missing is not None:
            raise ValueError(
                f"rank {rank} does not see the files that rank 0 sees, after waiting "
                f"{wait_s:.0f} s: {missing}; make sure that the folder is one file system, shared "
                "by all nodes, and start the command again"
            )


def _read_manifest(folder: Path) -> tuple[str, dict[str, Entry]]:
    """Return the SHA-256 of a manifest, and the files in it."""
    return hash_file(folder / MANIFEST), read_manifest(folder)


def _find_unseen(folder: Path, digest: str, entries: Mapping[str, Entry]) -> str | None:
    """Return the first file that differs from rank 0's manifest in existence or size."""
    try:
        next(folder.parent.iterdir(), None)  # NFS compares its cached listing with the server's
        if hash_file(folder / MANIFEST) != digest:
            return f"{folder / MANIFEST} has other bytes"
    except OSError as error:
        return f"{folder / MANIFEST}: {error.strerror}"
    wrong = next(filter(None, (find_wrong_size(folder, *one) for one in entries.items())), None)
    return None if wrong is None else f"{folder}: {wrong}"


def _find_damaged_file(
    folder: Path, entries: Mapping[str, Entry], world: World
) -> tuple[str, str] | None:
    """Check this rank's share of the files; return name and problem of a damaged one."""
    mine = list(entries)[world.rank :: world.size]
    with tqdm(
        desc=f"checking {folder.name}",
        total=sum(entries[name].size for name in mine),
        unit="B",
        unit_scale=True,
        delay=2.0,
        leave=False,
        disable=None if world.is_main else True,
    ) as bar:
        for name in mine:
            problem = _check_file(folder, name, entries[name], bar)
            if problem is not None:
                return name, problem
    return None


def _check_file(
    folder: Path, name: str, entry: Entry, bar: "tqdm[Any] | None" = None
) -> str | None:
    """Compare a file with its SHA-256; return the problem of a damaged one."""
    path = folder / name
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                if bar is not None:
                    bar.update(len(chunk))
        if digest.hexdigest() != entry.sha256:
            return f"{name} is damaged: its SHA-256 differs from {MANIFEST}"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None
