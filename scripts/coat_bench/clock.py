"""Measures the time of a call on the GPU without launch costs of the CPU.

Many ops take the GPU 30 to 60 us, and the CPU, which dispatches and launches several kernels, takes
longer: events around such a call would time the CPU. Therefore the call is captured in a CUDA graph
and replayed with one launch.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, cuda

FLUSH_BYTES = 2**28
"""Bytes zeroed before each replay: at least twice the L2 cache, as in triton's do_bench."""

BATCH = 30
"""Replays between two checks of the elapsed time; also the minimum number in a median."""

WARMUP_CALLS = 3
WARMUP_S = 0.05
"""Time in which the GPU's clock rate rises."""
MEASURED_S = 0.2


def measure_median_us(run: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU in microseconds, without launch costs of the CPU.

    Measured by CUDA events around at least 30 replays of a CUDA graph of the call. The L2 cache is
    flushed before each replay.

    Args:
        run: the call; its tensors are on the current GPU already.

    Raises:
        RuntimeError: the call fails, or cannot be captured because it waits for the GPU.
    """
    graph, cache = _capture(run), _allocate_flush_buffer()
    _time_replays_ms(graph, cache, WARMUP_S)
    return 1e3 * median(_time_replays_ms(graph, cache, MEASURED_S))


def _capture(run: Callable[[], Any]) -> cuda.CUDAGraph:
    """Warm up the call on a side stream and capture it in a graph there.

    Errors of the warm-up are unrelated to graphs and are raised unchanged.
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
            # The end of a failed capture raises a second, less specific error.
            reason = str(error.__context__ or error).splitlines()[0]
            raise RuntimeError(f"cannot be captured in a CUDA graph: {reason}") from error
    cuda.current_stream().wait_stream(side)
    return graph


def _allocate_flush_buffer() -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def _time_replays_ms(graph: cuda.CUDAGraph, cache: Tensor, seconds: float) -> list[float]:
    """Time single replays in batches until ``seconds`` have passed."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(BATCH)]
        for before, after in events:
            # The CPU launches the replay while the GPU zeroes the buffer, so the GPU does not wait.
            cache.zero_()
            before.record()
            graph.replay()
            after.record()
        cuda.synchronize()
        times += [before.elapsed_time(after) for before, after in events]
    return times
