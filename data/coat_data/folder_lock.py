"""Locks a file or a folder against other processes of this and other hosts; works on NFS.

The lock is a file of JSON with its holder and a random token. It is created by linking a complete
file to its name, which is also atomic on NFS; a thread of the holder renews its modification time.
If the holder ran on this host (same name, boot and process namespace), the lock is refused while
that process lives. Else it is taken over when its modification time has not advanced for
:data:`LIMIT_S` seconds by the clock of the file system. A holder that was stopped may wake up after
its lock was taken over, so it calls :meth:`FolderLock.check` before it writes.
"""

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
"""Seconds without a renewal after which the lock of another host is taken over."""

_RENEW_S = 5.0
_MISSING_S = 2.0  # seconds for which the lock may be missing while another process puts it back
_WAIT_S = 0.2
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class LockError(ValueError):
    """The lock is held by another process, or was taken over by one."""


@dataclass(slots=True)
class FolderLock:
    """A lock that this process, or rank 0 of its run, holds; see :func:`hold_lock`."""

    path: Path
    token: str
    _ended: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise LockError unless the lock is still this run's; reads one small file."""
        deadline = time.monotonic() + _MISSING_S
        while (holder := _read(self.path)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if holder is None or holder.get("token") != self.token:
            now = "is gone" if holder is None else f"is held by {_describe(holder)}"
            raise LockError(
                f"this process lost its lock: {self.path} {now}; another run took it over while "
                "this one was stopped or could not reach the file system, or it was deleted; this "
                "process writes nothing more"
            )

    def renew(self) -> None:
        """Advance the lock's modification time until :meth:`release` is called."""
        while not self._ended.wait(_RENEW_S):
            try:
                with self.path.open("r+b") as file:
                    if json.loads(file.read()).get("token") != self.token:
                        return
                    # By number, so that a lock that replaces this one meanwhile is not renewed.
                    os.utime(file.fileno())
            except (OSError, ValueError):
                continue  # the file system may come back; check() reports what matters

    def release(self) -> None:
        """Delete the lock, if it is still this run's."""
        self._ended.set()
        _remove(self.path, self.token)


@contextmanager
def hold_lock(
    path: Path, purpose: str, *, wait: bool = False, limit_s: float = LIMIT_S
) -> Iterator[FolderLock]:
    """Hold a lock inside this context; the folder of its file is created.

    ``purpose`` is the command, for the message to others. LockError if another process holds the
    lock, unless ``wait``; OSError if it cannot be written.
    """
    lock = FolderLock(path, secrets.token_hex(8))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**_describe_self(), "purpose": purpose, "token": lock.token}
    while True:
        try:
            _acquire(path, content, limit_s)
            break
        except LockError:
            if not wait:
                raise
            time.sleep(_WAIT_S)
    threading.Thread(target=lock.renew, name="lock", daemon=True).start()
    try:
        yield lock
    finally:
        lock.release()


def _acquire(path: Path, content: Mapping[str, Any], limit_s: float) -> None:
    own = path.with_name(f"{path.name}-{content['token']}")
    try:
        own.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        problem = f"cannot be locked: {error.strerror}"
        raise OSError(error.errno, problem, str(path.parent)) from error
    try:
        while not _link(own, path):
            holder = _read(path)
            if holder is not None:
                _wait_until_stale(path, holder, own, limit_s)
                _remove(path, holder.get("token"))
        os.utime(own)
        for file in path.parent.glob(f"{path.name}-*"):  # processes that were killed here left them
            with suppress(FileNotFoundError):
                if own.stat().st_mtime - file.stat().st_mtime >= limit_s:
                    file.unlink()
    finally:
        own.unlink(missing_ok=True)


def _link(own: Path, path: Path) -> bool:
    """Give the complete file ``own`` the name ``path``; return False if it is taken."""
    try:
        os.link(own, path)
    except FileExistsError:
        # A server may have linked it and lost the answer; the client then asked again.
        return own.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(own.read_bytes())
    return True


def _remove(path: Path, token: str | None) -> None:
    """Delete the lock with this token; renamed first, so that only one process gets it."""
    if (holder := _read(path)) is None or holder.get("token") != token:
        return
    aside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if (_read(aside) or {}).get("token") not in (token, None):
        _link(aside, path)
    aside.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a lock file; None without a file, an empty one if it is unreadable."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _wait_until_stale(path: Path, holder: Mapping[str, Any], own: Path, limit_s: float) -> None:
    """Return when the lock may be taken over or changed; raise LockError if its holder is alive."""
    here = _describe_self()
    alive: bool | None = None
    if holder.get("host") == here["host"]:
        alive, stopped = _find_process(holder)
        if alive:
            pid = holder["pid"]
            hint = f"; it is stopped (kill -CONT {pid} resumes it)" if stopped else ""
            raise LockError(_refuse(path, holder, hint))
    first: float | None = None
    while alive is None:
        os.utime(own)
        try:
            with path.open("rb") as file:  # on NFS, opening a file asks the server for its times
                renewed = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return
        if (_read(path) or {}).get("token") != holder.get("token"):
            return  # another process was faster; its lock is judged anew
        age = own.stat().st_mtime - renewed
        if first is not None and renewed > first:
            raise LockError(_refuse(path, holder, ""))
        if age >= limit_s:
            return
        if first is None:
            sys.stderr.write(
                f"coat-vlm: {path} is held by {_describe(holder)}; waiting up to "
                f"{limit_s - age:.0f} s to see whether it is alive\n"
            )
            first = renewed
        time.sleep(min(1.0, limit_s / 10))


def _find_process(holder: Mapping[str, Any]) -> tuple[bool | None, bool]:
    """Return whether the holder, a process of this host, is alive (None: unknown) and stopped."""
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return None, False
    hidden = not Path("/proc/self/stat").is_file()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False, False
    except PermissionError:  # another user's process, which /proc may hide
        hidden = True
    state, started = _read_process(pid)
    if started is None:
        return None if hidden else False, False
    same = started == holder.get("process_start") and state not in "ZX"
    return same, state in "Tt"


def _read_process(pid: int) -> tuple[str, int | None]:
    """Return state and start time (clock ticks since boot) of a process, from /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], int(fields[19])


def _describe_self() -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    host = [
        socket.gethostname(),
        boot.read_text(encoding="ascii").strip() if boot.is_file() else "",
        str(namespace.readlink()) if namespace.is_symlink() else "",
    ]
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": host, "pid": pid, "process_start": _read_process(pid)[1], "since": since}


def _describe(holder: Mapping[str, Any]) -> str:
    host = holder.get("host") or ["an unknown host"]
    return (
        f"coat-vlm {holder.get('purpose', '?')} (process {holder.get('pid', '?')} on {host[0]}, "
        f"since {holder.get('since', '?')})"
    )


def _refuse(path: Path, holder: Mapping[str, Any], hint: str) -> str:
    return (
        f"{path.parent} is in use by {_describe(holder)}{hint}; wait until it ends, end it, or use "
        f"another folder (the lock is {path})"
    )
