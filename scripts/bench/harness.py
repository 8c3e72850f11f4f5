"""What all benchmarks share: arguments, result lines and tables, timing on the GPU, memory.

A script is run as ``python scripts/bench/NAME.py``; the scripts import each other as siblings.
"""

import argparse
import csv
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor, cuda
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from coat_vlm import commit
from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8 import captured_bytes

PRECISIONS = ("bf16", "fp8_linear", "coat", "recompute_qkv")
"""Measured precisions; ``recompute_qkv`` is ``coat`` with ``fp8.recompute_qkv: true``."""

_FLUSH_BYTES = 2**28  # at least twice the L2 cache, as in triton's do_bench
_BATCH = 30  # replays between two checks of the elapsed time; also the least number in a median
_WARMUP_CALLS = 3
_WARMUP_S, _MEASURED_S = 0.05, 0.2  # the GPU's clock rate rises in the warm-up


def choose_precision(name: str) -> tuple[Precision, Fp8Config | None]:
    """Return the recipe keys ``precision`` and ``fp8`` of a name in :data:`PRECISIONS`."""
    if name == "recompute_qkv":
        return "coat", Fp8Config(recompute_qkv=True)
    return name, None  # pyright: ignore[reportReturnType]


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return RMS(actual - expected) / RMS(expected) in FP64; NaN stays NaN."""
    a, e = actual.double(), expected.double()
    return ((a - e).norm() / e.norm().clamp_min(1e-300)).item()


def make_parser(
    docstring: str | None, examples: str, *, csv: bool = True
) -> argparse.ArgumentParser:
    """Make the parser of a script, with its docstring and examples in ``--help``."""
    parser = argparse.ArgumentParser(
        description=docstring,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if csv:
        parser.add_argument("--csv", type=Path, help="append the results to this file")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run_script(
    parser: argparse.ArgumentParser,
    main: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the arguments and run a script; an error of the user becomes one line and status 2."""
    args = parser.parse_intermixed_args(argv)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # As the command coat-vlm: for child processes, and for this one, which has imported torch.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if cuda.is_available():
            cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        main(args)
    except (ValueError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        print(f"{parser.prog}: {error}\n(--debug shows the traceback)", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """Print from rank 0 only; a process without a launcher is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


@dataclass(slots=True)
class Result:
    """One measurement; the fields are the columns of its CSV file, these three first."""

    date: str
    commit: str
    gpu: str


@dataclass(slots=True)
class VersionedResult(Result):
    """One measurement with the versions of torch and Triton."""

    torch: str
    triton: str


def get_origin() -> tuple[str, str, str, str, str]:
    """Return the fields of :class:`VersionedResult` on this machine, with its GPU if any."""
    device = cuda.get_device_name() if cuda.is_available() else "cpu"
    date = datetime.now(UTC).date().isoformat()
    return date, commit() or "unknown", device, torch.__version__, triton.__version__


def require_gpu(what: str) -> None:
    """Raise ValueError without a GPU; ``what`` is subject and verb: "the speed of a step is"."""
    if not cuda.is_available():
        raise ValueError(f"there is no GPU; {what} measured on a GPU")


def format_error(error: Exception) -> str:
    """Format an error for a result: ``OOM``, or the error's class and first line."""
    if is_out_of_memory(error):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, Triton, cuBLAS or NCCL ran out of memory; only torch has a class for it."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def append_results(path: Path | None, results: Sequence[Result]) -> None:
    """Append results of one class to a CSV file, with a header if it is new; None: no file.

    ValueError: the file has other columns.
    """
    if path is None or not results:
        return
    columns = [field.name for field in fields(results[0])]
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if header != columns:
            raise ValueError(
                f"{path}: has the columns {header}, but these results have {columns}; write to "
                "another file"
            )
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        writer.writerows([_format_cell(v) for v in asdict(result).values()] for result in results)


def _format_cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def format_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def format_results(
    results: Sequence[Any], columns: Mapping[str, str | Callable[[Any], str]]
) -> str:
    """Format a Markdown table; ``columns``: title -> field, "field:digits", or a function."""

    def cell(result: Any, column: str | Callable[[Any], str]) -> str:
        if callable(column):
            return column(result)
        name, _, digits = column.partition(":")
        value = getattr(result, name)
        return format_number(value, int(digits)) if digits else str(value)

    lines = [[cell(result, column) for column in columns.values()] for result in results]
    return format_table(list(columns), lines)


def format_number(value: float | None, digits: int, unit: str = "") -> str:
    """Format a cell of a table; ``-`` if there is no value."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def measure_median_us(run: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU in microseconds, without launch costs of the CPU.

    Many ops take the GPU 30 to 60 us, and the CPU takes longer to launch their kernels, so events
    around a call would time the CPU. Therefore a CUDA graph of the call is replayed with one
    launch, at least 30 times. The L2 cache is flushed before each replay. RuntimeError: the call
    fails, or cannot be captured because it waits for the GPU.
    """
    graph = _capture(run)
    cache = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    _time_replays_ms(graph, cache, _WARMUP_S)
    return 1e3 * median(_time_replays_ms(graph, cache, _MEASURED_S))


def _capture(run: Callable[[], Any]) -> cuda.CUDAGraph:
    """Warm up the call on a side stream and capture it there; warm-up errors stay unchanged."""
    side, graph = cuda.Stream(), cuda.CUDAGraph()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(_WARMUP_CALLS):
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


def _time_replays_ms(graph: cuda.CUDAGraph, cache: Tensor, seconds: float) -> list[float]:
    """Time single replays in batches until ``seconds`` have passed."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_BATCH)]
        for before, after in events:
            # The CPU launches the replay while the GPU zeroes the buffer, so the GPU does not wait.
            cache.zero_()
            before.record()
            graph.replay()
            after.record()
        cuda.synchronize()
        times += [before.elapsed_time(after) for before, after in events]
    return times


def note_leftover_memory(device: torch.device) -> str:
    """Return the note about memory that an earlier measurement left allocated on a GPU, or ""."""
    left = cuda.memory_allocated(device) if device.type == "cuda" else 0
    return f"; {left / 1e9:.2f} GB of the peak are left from before" if left > 2**26 else ""


def note_memory(device: torch.device) -> str:
    """Return the note about CUDA graphs and the memory in use on the GPU, by all processes."""
    if device.type != "cuda":
        return ""
    graphs = f"; CUDA graphs of {captured_bytes() / 1e9:.2f} GB" if captured_bytes() else ""
    free, total = cuda.mem_get_info(device)
    return f"{graphs}; {(total - free) / 1e9:.2f} of {total / 1e9:.2f} GB in use on the GPU"


def free_memory(device: torch.device) -> None:
    """Free compiled code and unreferenced memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        cuda.synchronize(device)
        cuda.empty_cache()


def profile_step(step: Callable[[], object], device: torch.device) -> str:
    """Run a step, which is warmed up, under torch's profiler; formats kernels and CPU operators.

    The GPU is busy while at least one kernel or copy runs on any of its streams, including NCCL's
    waits for other ranks; in the rest of the step it mostly waits for the CPU's launches.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        step()
        if on_gpu:
            cuda.synchronize(device)
        wall_ms = 1e3 * (time.perf_counter() - started)
    averages = recorded.key_averages()
    tables = [averages.table(sort_by="self_cpu_time_total", row_limit=15)]
    if on_gpu:
        busy, until = 0.0, 0.0
        ran = [
            event.time_range
            for event in recorded.events() or ()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        for times in sorted(ran, key=lambda times: times.start):
            busy += max(0.0, times.end - max(until, times.start))
            until = max(until, times.end)
        tables.insert(0, averages.table(sort_by="self_cuda_time_total", row_limit=30))
        tables.insert(0, f"the GPU was busy for {busy / 1e3:.1f} ms, with {len(ran)} launches")
    return "\n".join([f"{wall_ms:.1f} ms under the profiler", *tables])
