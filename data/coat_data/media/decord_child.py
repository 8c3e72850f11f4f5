"""Reads frames with decord for another process, which kills this one when decord hangs.

Run as a script by :class:`coat_data.media.decord_reader.DecordReader`; imports nothing of this
package. A request on the standard input is a line of JSON and ``size`` bytes of video:

    {"path": "a.mp4", "size": 0, "times": [0.5, 1.5], "limit_s": 30}

The answer on the standard output is a line of JSON and the frames' bytes, 8 bits, RGB, row-major:

    {"times": [0.48, 1.48], "height": 720, "width": 1280}    or    {"error": "..."}

The frame at a time is the last one that starts by then, or the first of all; each is given once.
"""

import io
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO


def frame_indices(starts: Sequence[float], times: Sequence[float]) -> list[int]:
    """The distinct frames on screen at ``times``, by the ascending times at which frames start."""
    import numpy as np

    started = np.searchsorted(starts, times, side="right") - 1
    return np.unique(started.clip(min=0)).tolist()


def shown_at(source: Any, times: Sequence[float]) -> tuple[list[float], Any]:
    """Start times of the frames on screen at ``times``, and their pixels (N, H, W, 3) uint8."""
    import decord  # pyright: ignore[reportMissingImports] - optional

    # Threads of their own would only contend with those of the other loading processes.
    reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
    starts = reader.get_frame_timestamp(range(len(reader)))[:, 0]
    indices = frame_indices(starts, times)
    return [float(starts[index]) for index in indices], reader.get_batch(indices).asnumpy()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        data = requests.read(request["size"])
        # Should the other process be gone too, the kernel ends this one; it needs no lock for that.
        signal.alarm(math.ceil(request["limit_s"]) + 1)
        try:
            source = io.BytesIO(data) if data else request["path"]
            times, frames = shown_at(source, request["times"])
            head = {"times": times, "height": frames.shape[1], "width": frames.shape[2]}
            body = frames.tobytes()
        except Exception as error:  # decord's own, MemoryError, ImportError, and others
            head, body = {"error": f"{type(error).__name__}: {error}"}, b""
        signal.alarm(0)
        answers.write(json.dumps(head).encode() + b"\n" + body)
        answers.flush()


def main() -> None:
    """Serve on the standard streams; what libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
