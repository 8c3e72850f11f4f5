"""The time of a call on the GPU, without what the CPU takes to launch it.

Many ops take the GPU 30 to 60 us, and the CPU, which dispatches them and launches several kernels,
longer: events around such a call would time the CPU. So the call is captured in a CUDA graph, which
one launch replays.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, cuda

FLUSH_BYTES = 2**28
"""Size of what is zeroed before each replay: twice the L2 cache or more, as triton's do_bench."""

BATCH = 30
"""Replays between two looks at the watch, so also the fewest that a median is of."""

WARMUP_CALLS = 3
WARMUP_S = 0.05
"""The GPU's clock rises in it."""
MEASURED_S = 0.2


def median_us(run: Callable[[], Any]) -> float:
    """Median time of a call on the GPU in microseconds, without launch costs of the CPU.

    CUDA events around replays of a CUDA graph of the call, at least 30 of them, the L2 cache
    flushed before each.

    Args:
        run: the call; its tensors were made before, on the current GPU.

    Raises:
        RuntimeError: the call fails, or cannot be captured (one that waits for the GPU cannot).
    """
    graph, cache = _captured(run), _flush_buffer()
    _times_ms(graph, cache, WARMUP_S)
    return 1e3 * median(_times_ms(graph, cache, MEASURED_S))


def _captured(run: Callable[[], Any]) -> cuda.CUDAGraph:
    """A graph of the call, which is warmed up on the same side stream.

    Errors of the warm-up have nothing to do with graphs and are passed on.
    """
    side, graph = cuda.Stream(), cuda.CUDAGraph()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            run()
        try:
            with cuda.graph(graph, stream=side):
                run()
        except RuntimeError as error:
            # The end of a failed capture raises, too, and says less.
            reason = str(error.__context__ or error).splitlines()[0]
            raise RuntimeError(f"cannot be captured in a CUDA graph: {reason}") from error
    cuda.current_stream().wait_stream(side)
    return graph


def _flush_buffer() -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def _times_ms(graph: cuda.CUDAGraph, cache: Tensor, seconds: float) -> list[float]:
    """Times of single replays, batch by batch until so much time has passed."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(BATCH)]
        for before, after in events:
            # While the GPU zeroes, the CPU launches the replay: it does not wait for it.
            cache.zero_()
            before.record()
            graph.replay()
            after.record()
        cuda.synchronize()
        times += [before.elapsed_time(after) for before, after in events]
    return times
