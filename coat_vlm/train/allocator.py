"""Tells the C library to keep freed memory, which speeds up training on a CPU."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt (glibc, malloc/malloc.h)."""

_MIB = 2**20


def keep_freed_memory() -> bool:
    """Make glibc reuse freed blocks of up to 32 MiB; returns whether it took the settings.

    By default glibc returns memory to the system when much of it is free, as it is after every
    backward pass, and the next forward pass pays for a page fault per 4 KiB of its results: about
    a third of the time of a small model's step (docs/results.md). Kept memory serves later tensors
    of the process; up to 1 GiB of it may lie idle. Larger blocks are mapped one by one as before.
    Without glibc (macOS, musl) nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # 32 MiB is the largest threshold that mallopt's manual allows.
    settings = ((_MMAP_THRESHOLD, 32), (_TRIM_THRESHOLD, 1024), (_TOP_PAD, 64))
    taken = [mallopt(parameter, mib * _MIB) for parameter, mib in settings]
    return all(taken)
