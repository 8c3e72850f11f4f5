"""Worker processes that read ahead; results come in the order of the requests.

torch's DataLoader is not used: the tools read rows without the slow import of torch, and its
handler of SIGCHLD raises errors anywhere in the main process when a worker was killed. Tensors are
passed in shared memory here as well, if torch is imported.
"""

import atexit
import errno
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from coat_data.sample import DataError

_AHEAD = 2  # requests that are assigned to a worker process before its first result is taken
_IDLE = -1  # in place of a request, for a worker that reads none
_NO_DESCRIPTOR = 24  # exit status of a worker that cannot pass its tensors

Request = TypeVar("Request")
T = TypeVar("T")


def in_workers(
    work: Callable[[Request], T],
    requests: Iterable[Request],
    num_workers: int,
    timeout_s: float = 0.0,
    describe: Callable[[Request], str] = str,
) -> Iterator[T]:
    """Yield ``work(request)`` for each request, in order; ``num_workers`` 0 works in this process.

    ``describe`` names the rows of a request, for errors: a DataError of ``work``, unchanged, or of
    a worker that gave no result in ``timeout_s`` seconds or was killed.
    """
    if not num_workers:
        yield from map(work, requests)
        return
    workers = _Workers(work, num_workers)
    waiting: deque[Request] = deque()
    remaining = enumerate(requests)

    def assign(number: int) -> None:
        for index, request in itertools.islice(remaining, number):
            waiting.append(request)
            workers.send(index, request)

    try:
        assign(num_workers * _AHEAD)
        for number in itertools.count():
            if not waiting:
                return
            try:
                result, error = workers.take(number, timeout_s)
            except (OSError, EOFError) as broken:
                rows = describe(waiting[workers.reads(number) - number])
                status = workers.status(number)
                if status == _NO_DESCRIPTOR or getattr(broken, "errno", None) == errno.EMFILE:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from broken
                late_s = timeout_s if isinstance(broken, TimeoutError) else None
                raise _make_error(rows, status, late_s) from broken
            waiting.popleft()
            if error is not None:
                raise error
            assign(1)
            yield result
    finally:
        workers.end()


def _make_error(rows: str, status: int | None, late_s: float | None) -> DataError:
    problem = f"a worker process was killed (exit status {status}) while it read these rows"
    remedy = "if the machine ran out of memory, use fewer workers (num_workers) or a smaller "
    remedy += "packing.buffer"
    if late_s is not None:
        problem = f"a worker process has not finished reading these rows in {late_s:g} s"
        remedy = "check that their files and servers answer (coat-vlm data lint), or raise "
        remedy += "data_timeout_s"
    elif status == -signal.SIGBUS:
        remedy = "give the container more shared memory (--shm-size=8g), or set num_workers=0"
    return DataError(rows, problem, remedy)


class _Workers:
    """Processes, each with a pipe; request n belongs to process n modulo their number."""

    def __init__(self, work: Callable[[Any], Any], number: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._current = context.RawArray("q", [_IDLE] * number)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        atexit.register(self.end)  # multiprocessing would send SIGTERM, and wait
        for place in range(number):
            here, there = context.Pipe()
            arguments = (there, work, self._current, place)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def send(self, index: int, request: Any) -> None:
        """Assign a request."""
        with suppress(OSError):  # a process that was killed is found when its result is taken
            self._pipes[index % len(self._pipes)].send((index, request))

    def take(self, index: int, timeout_s: float) -> Any:
        """Return result and error of a request.

        TimeoutError if its process was killed after ``timeout_s``; OSError or EOFError if it ended.
        """
        place = index % len(self._pipes)
        pipe, process = self._pipes[place], self._processes[place]
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        # pipe.poll() is not enough: a tensor is read from the process that made it, which may have
        # stopped since.
        timer = threading.Timer(timeout_s, stop)
        timer.daemon = True
        if timeout_s:
            timer.start()
        try:
            return pipe.recv()
        except (OSError, EOFError) as error:
            if expired.is_set():
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()

    def reads(self, index: int) -> int:
        """Return the request that the process of request ``index`` reads, perhaps a later one."""
        return max(self._current[index % len(self._pipes)], index)

    def status(self, index: int) -> int | None:
        """Return the exit status of a process that has ended, negative for a signal."""
        process = self._processes[index % len(self._pipes)]
        process.join(1.0)
        return process.exitcode

    def end(self) -> None:
        """Kill the processes, also stopped ones, which would not end by themselves."""
        if not self._processes:  # at exit this was called already
            return
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes.clear()
        atexit.unregister(self.end)


def _serve(
    pipe: Connection, work: Callable[[Any], Any], current: MutableSequence[int], place: int
) -> None:
    # torchrun, schedulers and terminals send these to the whole process group; the main process
    # handles them, and needs its workers to save a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # multiprocessing's thread that passes tensors reports its errors here; without descriptors it
    # would try again forever, while the main process waits.
    sys.excepthook = lambda *_: os._exit(_NO_DESCRIPTOR)
    with suppress(EOFError):
        while True:
            index, request = pipe.recv()
            current[place] = index
            try:
                answer = work(request), None
            except DataError as error:
                answer = None, error
            except Exception as error:
                error.add_note("".join(traceback.format_exception(error)))  # pickle drops the cause
                answer = None, error
            current[place] = _IDLE
            try:
                pipe.send(answer)
            except (OSError, RuntimeError) as error:  # no descriptor or shared memory for a tensor
                pipe.send((None, error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def in_batches(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split ``rows`` into requests of ``size`` rows."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
