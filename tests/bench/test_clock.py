"""The clock of the kernel benchmarks: on a simulated GPU, and on a real one beside do_bench."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from coat_bench import adamw, clock, gemm, kernels
from coat_bench.clock import BATCH, FLUSH_BYTES, measure_median_us

FLUSH_MS = 7.0


class FakeGpu:
    """``torch.cuda`` of a GPU whose time goes on only when it works."""

    def __init__(self, replays_ms: list[float]) -> None:
        self.now_ms = 0.0
        self.replays_ms = replays_ms
        """What the replays take, one after the other, from the start again at the end."""
        self.log: list[str] = []
        self.capturing = False

    def call(self) -> None:
        self.log.append("captured" if self.capturing else "warm-up")

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def Stream(self) -> Any:  # noqa: N802
        gpu = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                gpu.log.append("wait")

        return Stream()

    current_stream = Stream

    def CUDAGraph(self) -> Any:  # noqa: N802
        gpu = self

        class Graph:
            def replay(self) -> None:
                count = gpu.log.count("replay")
                gpu.log.append("replay")
                gpu.now_ms += gpu.replays_ms[count % len(gpu.replays_ms)]

        return Graph()

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: failed due to a previous error") from None
        finally:
            self.capturing = False

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        gpu = self

        class Event:
            ms = -1.0

            def record(self) -> None:
                self.ms = gpu.now_ms

            def elapsed_time(self, end: Any) -> float:
                return end.ms - self.ms

        return Event()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def zero_(self) -> None:
        self.log.append("flush")
        self.now_ms += FLUSH_MS


def with_gpu(monkeypatch: pytest.MonkeyPatch, replays_ms: list[float]) -> FakeGpu:
    gpu = FakeGpu(replays_ms)
    monkeypatch.setattr(clock, "cuda", gpu)
    monkeypatch.setattr(clock, "_allocate_flush_buffer", lambda: gpu)
    monkeypatch.setattr(clock, "WARMUP_S", 0.0)
    monkeypatch.setattr(clock, "MEASURED_S", 0.0)
    return gpu


def test_the_time_is_the_median_of_replays_after_a_flush(monkeypatch: pytest.MonkeyPatch):
    # Five replays of a measured batch are slow, as is the whole batch before it.
    gpu = with_gpu(monkeypatch, [9.0] * BATCH + [0.002] * (BATCH - 5) + [9.0] * 5)
    assert measure_median_us(gpu.call) == pytest.approx(2.0)
    calls = [what for what in gpu.log if what not in ("wait", "synchronize")]
    assert calls[: -4 * BATCH] == ["warm-up"] * clock.WARMUP_CALLS + ["captured"]
    assert calls[-4 * BATCH :] == ["flush", "replay"] * (2 * BATCH)
    assert BATCH >= 30
    assert gpu.log[0] == "wait", "the side stream must wait for the arguments"
    assert gpu.log[-1] == "synchronize"


def test_batches_are_replayed_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    gpu = with_gpu(monkeypatch, [1.0])
    seconds = iter([0.0, 0.1, 0.2, 0.3])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(seconds))
    assert len(clock._time_replays_ms(gpu.CUDAGraph(), gpu, 0.25)) == 3 * BATCH  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_captured_is_refused(monkeypatch: pytest.MonkeyPatch):
    gpu = with_gpu(monkeypatch, [1.0])

    def waits() -> None:
        gpu.call()
        if gpu.capturing:
            raise RuntimeError("CUDA error: operation not permitted\nSearch for it in the manual")

    message = r"^cannot be captured in a CUDA graph: CUDA error: operation not permitted$"
    with pytest.raises(RuntimeError, match=message):
        measure_median_us(waits)
    assert "replay" not in gpu.log


def test_errors_of_the_call_itself_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    gpu = with_gpu(monkeypatch, [1.0])

    def broken() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        measure_median_us(broken)
    assert "replay" not in gpu.log


def test_all_three_commands_use_this_clock():
    assert kernels.measure_median_us is gemm.measure_median_us is adamw.measure_median_us


@pytest.mark.gpu
def test_on_a_gpu_a_large_op_takes_what_do_bench_says():
    from triton.testing import do_bench

    assert 2 * torch.cuda.get_device_properties(0).L2_cache_size <= FLUSH_BYTES
    # Not a copy: in a graph it is a memcpy node, which runs slower.
    x = torch.zeros(2**28, device="cuda")
    y = torch.empty_like(x)
    expected: Any = do_bench(lambda: torch.add(x, 1, out=y), return_mode="median")
    assert measure_median_us(lambda: torch.add(x, 1, out=y)) == pytest.approx(
        1e3 * expected, rel=0.25
    )


@pytest.mark.gpu
def test_on_a_gpu_what_the_cpu_takes_is_left_out_and_the_work_is_not():
    x = torch.zeros(2**20, device="cuda")

    def slow_to_launch() -> None:
        time.sleep(1e-3)
        x.add_(1)

    # 4 MiB read and written: a few microseconds.
    assert 0.5 < measure_median_us(slow_to_launch) < 100
    replays = x[0].item() - clock.WARMUP_CALLS
    assert replays >= 2 * BATCH
    assert bool((x == x[0]).all())


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_waits_is_refused_and_the_next_one_measured():
    # In a process of its own, since CUDA may be unusable after a capture that failed.
    script = """
import torch
from coat_bench.clock import measure_median_us
x = torch.zeros(2**20, device="cuda")
try:
    measure_median_us(lambda: x.sum().item())
except RuntimeError as error:
    print(error)
print(0 < measure_median_us(lambda: x + 1) < 1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refusal, measured = done.stdout.splitlines()
    assert refusal.startswith("cannot be captured in a CUDA graph: ")
    assert measured == "True"
