"""Asks decord in a child process for frames, within a wall-clock limit.

Workers of a DataLoader are daemons, which may have no children of ``multiprocessing``; so the child
is a plain subprocess that each reading process owns and uses for all its clips.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from coat_data.media import decord_child
from coat_data.sample import Media

# -P: the script's folder must not stand before the libraries, or coat_data's modules hide theirs.
_COMMAND = (sys.executable, "-P", str(Path(decord_child.__file__).resolve()))


class DecordError(Exception):
    """decord did not give the frames.

    Attributes:
        kind: ``timeout``: killed after the limit; ``crash``: the child ended; ``error``: decord
            refused the file.
    """

    def __init__(self, kind: Literal["timeout", "crash", "error"], problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class DecordReader:
    """Reads with decord in a child that is started when needed and killed when it hangs.

    Args:
        timeout_s: wall-clock limit of one request in seconds, the child's start included.
        command: what to run as the child.
    """

    def __init__(self, timeout_s: float, command: Sequence[str] = _COMMAND) -> None:
        self._timeout_s = timeout_s
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the child, which belongs to this process."""
        return {**self.__dict__, "_child": None}

    def shown_at(self, media: Media, times: list[float]) -> list[tuple[float, Image.Image]]:
        """The distinct frames on screen at ``times``, with their start times, upright.

        Raises:
            DecordError: there are none, and why.
        """
        child = self._running()
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            child.kill()

        timer = threading.Timer(self._timeout_s, stop)
        timer.start()
        try:
            return self._ask(child, media, times)
        except (OSError, EOFError) as error:
            self.close()
            if expired.is_set():
                raise DecordError("timeout", f"no answer in {self._timeout_s} s") from error
            raise DecordError("crash", "the child process ended") from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """Kill the child, if this process has one."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was still to be written has no reader any more
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
                stderr=subprocess.DEVNULL,  # FFmpeg's remarks on every damaged packet
            )
        return self._child

    def _ask(
        self, child: subprocess.Popen[bytes], media: Media, times: list[float]
    ) -> list[tuple[float, Image.Image]]:
        assert child.stdin is not None
        assert child.stdout is not None
        data = media.data or b""
        path = None if media.path is None else os.fspath(media.path)
        request = {"path": path, "size": len(data), "times": times, "limit_s": self._timeout_s}
        child.stdin.write(json.dumps(request).encode() + b"\n" + data)
        child.stdin.flush()
        line = child.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer = json.loads(line)
        if "error" in answer:
            raise DecordError("error", answer["error"])
        shape = (len(answer["times"]), answer["height"], answer["width"], 3)
        size = int(np.prod(shape))
        body = child.stdout.read(size)
        if len(body) < size:
            raise EOFError
        frames = np.frombuffer(body, dtype=np.uint8).reshape(shape)
        images = [Image.fromarray(frame) for frame in frames]
        return list(zip(answer["times"], images, strict=True))
