"""Exits a rank whose launcher has exited."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
_POLL_S = 1.0


def die_with_launcher() -> None:
    """Let this process die when its launcher does, if a launcher started it.

    A launcher that is killed (``kill -9``) cannot end its ranks: they would train on unseen, next
    to the run that replaces them. Linux sends them SIGKILL in that moment, also when the *thread*
    that started them ends. A command without the launcher's variables outlives its shell.

    DeepSpeed's ``deepspeed`` starts a second process, which starts the ranks. If only the first one
    ends, the ranks stop as after SIGTERM: they may have received the same signal, and be saving.
    """
    if sys.platform != "linux" or not all(name in os.environ for name in _RANK_VARIABLES):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.stderr.write("coat-vlm: the launcher exited; this rank exits\n")
        os._exit(1)
    runner = _find_parent(parent)
    # DeepSpeed sets CROSS_RANK. Its second process may also have been started by a shell, which
    # may end first, as under nohup.
    if "CROSS_RANK" in os.environ and b"deepspeed" in _read(f"/proc/{runner}/cmdline"):
        threading.Thread(
            target=_stop_without, args=(parent, runner), name="launcher", daemon=True
        ).start()


def _stop_without(parent: int, runner: int) -> None:
    """Send SIGTERM to this process when its parent's parent is no longer ``runner``."""
    while _find_parent(parent) == runner:
        time.sleep(_POLL_S)
    sys.stderr.write("coat-vlm: DeepSpeed's launcher exited; this rank stops\n")
    os.kill(os.getpid(), signal.SIGTERM)


def _find_parent(pid: int) -> int:
    """Return the parent of a process of this machine; 0 if the process has ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
