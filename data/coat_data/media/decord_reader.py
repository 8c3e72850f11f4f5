"""Reads frames with decord in a child process, which is killed when decord hangs.

The child is this module, run as a script: worker processes are daemons, which may not have children
of ``multiprocessing``. Messages are pickled: a request is ``(path or bytes, times, limit in
seconds)``, the answer ``(start times, frames)`` with frames (N, height, width, 3) uint8 in RGB, or
a string with the error.

The frame at a time is the last one that starts by then, or the first one; duplicates are dropped.
"""

import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from coat_data.sample import Media

# -P: the folder it runs in must not stand before the libraries.
_COMMAND = (sys.executable, "-P", "-m", "coat_data.media.decord_reader")
TIMEOUT_S = 30.0
"""Seconds after which a video is read with PyAV instead."""


class DecordError(Exception):
    """decord did not return the frames.

    ``kind`` is ``timeout`` (killed after the limit), ``crash`` (the child ended) or ``error``
    (decord refused the file).
    """

    def __init__(self, kind: Literal["timeout", "crash", "error"], problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class DecordReader:
    """Reads with decord in a child process, started on demand and killed after ``timeout_s``."""

    def __init__(self, timeout_s: float = TIMEOUT_S, command: Sequence[str] = _COMMAND) -> None:
        self._timeout_s = timeout_s
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_child": None}

    def read_at(self, media: Media, times: list[float]) -> list[tuple[float, Image.Image]]:
        """Return the distinct frames at ``times``, upright, with start times; or DecordError."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            child.kill()

        timer = threading.Timer(self._timeout_s, stop)
        timer.start()
        try:
            pickle.dump((media.data or media.path, times, self._timeout_s), child.stdin)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.close()
            if expired.is_set():
                raise DecordError("timeout", f"no answer in {self._timeout_s} s") from error
            raise DecordError("crash", "the child process ended") from error
        finally:
            timer.cancel()
        if isinstance(answer, str):
            raise DecordError("error", answer)
        return [(time, Image.fromarray(frame)) for time, frame in zip(*answer, strict=True)]

    def close(self) -> None:
        """Kill the child of this process, if any."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # the child is gone, so the rest of the request cannot be sent
                continue

    def _running(self) -> subprocess.Popen[bytes]:
        # A forked process has a copy of its parent's child, whose answers go to the parent.
        mine = self._owner == os.getpid()
        if self._child is None or not mine or self._child.poll() is not None:
            self.close()
            self._owner = os.getpid()
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # FFmpeg's warnings for every damaged packet
            )
        return self._child


def frame_indices(starts: Sequence[float], times: Sequence[float]) -> list[int]:
    """Return the distinct frames at ``times``; ``starts`` are the start times of all frames."""
    started = np.searchsorted(starts, times, side="right") - 1
    return np.unique(started.clip(min=0)).tolist()


def _decode(source: Any, times: Sequence[float]) -> tuple[list[float], np.ndarray]:
    """Decode the frames at ``times``: start times, and pixels (N, H, W, 3) uint8."""
    import decord  # pyright: ignore[reportMissingImports] - optional

    # More threads would only compete with the other loading processes.
    reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
    starts = reader.get_frame_timestamp(range(len(reader)))[:, 0]
    indices = frame_indices(starts, times)
    return [float(starts[index]) for index in indices], reader.get_batch(indices).asnumpy()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while requests.peek(1):  # pyright: ignore[reportAttributeAccessIssue]
        source, times, limit_s = pickle.load(requests)
        # If the parent is gone as well, the kernel ends this process; this needs no lock.
        signal.alarm(math.ceil(limit_s) + 1)
        try:
            answer = _decode(io.BytesIO(source) if isinstance(source, bytes) else source, times)
        except Exception as error:  # decord's own, MemoryError, ImportError, and others
            answer = f"{type(error).__name__}: {error}"
        signal.alarm(0)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries
    _serve(sys.stdin.buffer, out)
