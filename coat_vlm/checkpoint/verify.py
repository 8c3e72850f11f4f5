"""Checks that the files of a folder are as they were written, and that all ranks see the same.

Rank 0 decides what is in a folder. On a network file system another rank may see an earlier listing
or earlier content for some time (on NFS up to a minute), so it waits, and then raises an error
that names the rank and the missing file.
"""

import hashlib
import socket
import time
from collections.abc import Mapping
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


def find_damage(folder: Path, world: World = ALONE) -> str | None:
    """Return why a folder is incomplete or damaged, or None; reads and compares every file.

    All ranks share the work and get the same result. Raises ValueError if a rank does not see the
    files that rank 0 sees after ``WAIT_S``, or the folder has another format version.
    """

    def look() -> tuple[str | None, str, dict[str, Entry]]:
        problem = find_problem(folder)
        if problem is not None:
            return problem, "", {}
        return None, hash_file(folder / MANIFEST), read_manifest(folder)

    problem, digest, entries = world.run_on_rank0(look)
    if problem is not None:
        return problem
    _wait_for_files(folder, digest, entries, world)
    damaged = world.gather(_find_damaged_file(folder, entries, world))
    name = next((name for name, _ in filter(None, damaged)), None)
    if name is None:
        return None
    damage = world.run_on_rank0(lambda: _check_file(folder, name, entries[name]))
    if damage is None:
        rank = next(rank for rank, problem in enumerate(damaged) if problem is not None)
        raise ValueError(
            f"rank {rank} reads different bytes in {folder / name} than rank 0; make sure that the "
            "folder is one file system, shared by all nodes"
        )
    return damage


def _wait_for_files(folder: Path, digest: str, entries: Mapping[str, Entry], world: World) -> None:
    """Wait until every rank sees what rank 0 sees; otherwise ValueError on every rank."""
    deadline = time.monotonic() + WAIT_S
    while (unseen := _find_unseen(folder, digest, entries)) and time.monotonic() < deadline:
        time.sleep(min(1.0, WAIT_S / 10))
    unseen = unseen and f"{unseen} (host {socket.gethostname()})"
    for rank, missing in enumerate(world.gather(unseen)):
        if missing is not None:
            raise ValueError(
                f"rank {rank} does not see the files that rank 0 sees, after waiting "
                f"{WAIT_S:.0f} s: {missing}; make sure that the folder is one file system, shared "
                "by all nodes, and start the command again"
            )


def _find_unseen(folder: Path, digest: str, entries: Mapping[str, Entry]) -> str | None:
    """Return the first file that differs from rank 0's manifest in existence or size."""
    try:
        next(folder.parent.iterdir(), None)  # NFS compares its cached listing with the server's
        if hash_file(folder / MANIFEST) != digest:
            return f"{folder / MANIFEST} has different bytes"
    except OSError as error:
        return f"{folder / MANIFEST}: {error.strerror}"
    wrong = next(filter(None, (find_wrong_size(folder, *item) for item in entries.items())), None)
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
