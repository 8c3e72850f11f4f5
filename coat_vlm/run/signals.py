"""Stops a command after a signal: at once, or at the end of work that must not be interrupted.

SIGTERM, SIGUSR1 and SIGHUP (unless it is ignored, as under nohup) end a command with status 75, so
that a scheduler starts it again; Ctrl-C ends it with 130. Each signal is acknowledged by one line
on stderr within a moment, even while the main thread waits in a collective: C code writes the
signal's number into a socket (:func:`signal.set_wakeup_fd`), and a thread reads it. Then

- inside :meth:`Signals.hold` (the steps of training, an atomic save) the signal is recorded, and
  raised at the end of the context;
- inside :meth:`Signals.wait` (waiting for a batch) the wait ends at once;
- anywhere else SystemExit is raised at once. Python can only raise it when native code returns: a
  rank that waits for others to connect may not return for minutes. Then the thread ends the
  process.

Signals that follow while the exception is raised interrupt no cleanup; after another Ctrl-C the
thread ends a cleanup that takes longer than ``RETURN_S``.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

EXIT_REQUEUE = 75
"""EX_TEMPFAIL: SIGTERM, SIGUSR1 or SIGHUP stopped the command; start the same command again."""
EXIT_INTERRUPTED = 130
"""Ctrl-C stopped the command."""

RETURN_S = 3.0
"""Seconds for which a signal that nothing holds waits until native code returns."""

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_END = b"\0"
"""Ends the thread that acknowledges signals."""

_T = TypeVar("_T")


class _WaitEnded(BaseException):
    """Raised by the handler inside :meth:`Signals.wait`."""


class Signals:
    """The signals of this process; use the one instance :data:`SIGNALS`.

    Loader processes inherit the handlers and ignore the signals: the main process ends the loaders.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The last signal since :meth:`handle` was entered."""
        self._holds: list[str] = []
        self._process = -1
        self._waits = False
        self._stopping = False  # an exception was raised for a signal
        self._insists = False  # Ctrl-C was received since

    @property
    def exit_status(self) -> int:
        """Exit status of the process after the signal."""
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_REQUEUE

    @contextmanager
    def handle(self) -> Iterator["Signals"]:
        """Handle signals inside this context, in the main thread; an inner one changes nothing."""
        if self._process == os.getpid():
            yield self
            return
        self.received, self._holds, self._waits = None, [], False
        self._stopping = self._insists = False
        self._process = os.getpid()
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        acknowledges = threading.Thread(
            target=self._acknowledge, args=(reading,), name="signals", daemon=True
        )
        acknowledges.start()
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.getsignal(number) for number in _NUMBERS}
        try:
            for number, handler in handlers.items():
                if number == signal.SIGINT or handler != signal.SIG_IGN:
                    signal.signal(number, self._handle)
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._process = -1
            writing.send(_END)  # forked processes may still hold the socket open
            acknowledges.join(timeout=1.0)
            writing.close()
            reading.close()

    @contextmanager
    def hold(self, until: str) -> Iterator[None]:
        """Only record signals inside this context; raise the recorded one at its end.

        A second Ctrl-C is raised at once. An exception that leaves the context has precedence.
        ``until`` completes the sentence "stops ..." of the acknowledgement.
        """
        self._holds.append(until)
        stops = True
        try:
            yield
        except BaseException as error:
            # An error of a collective: the other ranks may have stopped already.
            stops = isinstance(error, RuntimeError)
            raise
        finally:
            self._holds.pop()
            if stops:
                self._stop()

    def wait(self, get: Callable[[], _T]) -> _T | None:
        """Return ``get()``, or None if a signal ended it or had been received before."""
        if self.received is not None:
            return None
        try:
            try:  # the signal may also arrive while this block ends
                self._waits = True
                return get()
            finally:
                self._waits = False
        except _WaitEnded:
            return None

    def _stop(self) -> None:
        """Raise for the received signal, if there is one and nothing holds it."""
        if self.received is None or self._holds:
            return
        self._stopping = True
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(EXIT_REQUEUE)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        if self._stopping:  # another exception would only interrupt the cleanup
            self._insists |= number == signal.SIGINT
            return
        if self.received == number == signal.SIGINT:
            self._stopping = True
            raise KeyboardInterrupt
        self.received = number
        if self._waits:
            self._waits = False  # a second signal must not be raised while the first one is handled
            raise _WaitEnded
        self._stop()

    def _acknowledge(self, reading: socket.socket) -> None:
        """Print one line per signal, in a thread of its own; end a process that cannot stop."""
        rank = f"[rank {os.environ.get('RANK')}] " if "RANK" in os.environ else ""
        numbers, last = b"", 0
        while _END not in numbers:
            try:
                numbers = reading.recv(64)
            except TimeoutError:
                reading.settimeout(None)
                # The handler, which runs before any other Python code of the main thread, has not.
                lost = self.received is None and not self._holds and not self._waits
                if lost or self._insists:
                    awaited = "the cleanup" if self._insists else "native code to return"
                    sys.stderr.write(f"coat-vlm: {rank}does not wait for {awaited}\n")
                    os._exit(EXIT_INTERRUPTED if last == signal.SIGINT else EXIT_REQUEUE)
                continue
            for number in dict.fromkeys(numbers):
                if number in _NUMBERS:
                    last = number
                    name, when = signal.Signals(number).name, [*self._holds, "now"][0]
                    sys.stderr.write(f"coat-vlm: {rank}{name} received; stops {when}\n")
                    reading.settimeout(RETURN_S)


SIGNALS = Signals()
"""The signals of this process."""


def _forget_in_child() -> None:
    """Detach a forked process from its parent's socket, or the parent would read its signals."""
    if SIGNALS._process != -1:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)
