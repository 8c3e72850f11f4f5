"""Where the time of a training step goes: what the GPU does, what it waits for, what the CPU does.

From torch's profiler. The GPU is *busy* while at least one kernel, copy or memset runs on any of
its streams (the union of their intervals), and *idle* for the rest of the step, mostly because the
CPU has not launched anything yet. NCCL's kernels are busy while they wait for other ranks, too. The
profiler itself costs the CPU some time per operator and launch, so idle time is compared with the
step without it as well.

What a GPU kernel is for is told by its name. Our own kernels are listed one by one, so that a new
one has to be given its kind. All others have names that their libraries make; the patterns are
those of cuBLASLt, CUTLASS, cuDNN, torch's flash attention, ATen, Liger, DeepSpeed, torchao and NCCL
as they stand in traces of Hopper GPUs.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from coat_bench.rows import table_of
from coat_vlm.fp8.weights import QUANTIZATION

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls in which the CPU waits for the GPU."""

KERNELS = 25
"""Lines of the table of kernels."""

OPERATORS = 15
"""Lines of the table of operators."""


FP8_PRODUCTS = "FP8 products"
OTHER_PRODUCTS = "products in BF16, FP16 or FP32"
ATTENTION = "attention"
WEIGHTS = "quantization of weights"
LOSS = "loss"
NORMS = "other norms"
OPTIMIZER = "optimizer and clipping"
COPIES = "copies and memsets"
NCCL = "NCCL"
ELEMENTWISE = "other element-wise ops and sums"
OTHER = "unknown"

QUANTIZE, ROWS, GROUPS = "FP8: quantize", "FP8: quantize by row", "FP8: quantize by group"
FP8_NORM, ACTIVATION, ROPE = "FP8: norm", "FP8: activation", "FP8: rotation"

OURS: dict[str, str] = {
    "_amax_kernel": QUANTIZE,
    "quantize_tensor_kernel": QUANTIZE,
    "_transpose_codes_kernel": QUANTIZE,
    "_dequantize_tensor_kernel": QUANTIZE,
    "_quantize_rows_kernel": ROWS,
    "_dequantize_rows_kernel": ROWS,
    "_quantize_group_kernel": GROUPS,
    "_dequantize_group_kernel": GROUPS,
    "_norm_stats_kernel": FP8_NORM,
    "_norm_apply_kernel": FP8_NORM,
    "_norm_bwd_kernel": FP8_NORM,
    "_activation_stats_kernel": ACTIVATION,
    "_activation_apply_kernel": ACTIVATION,
    "_activation_bwd_stats_kernel": ACTIVATION,
    "_activation_bwd_apply_kernel": ACTIVATION,
    "_rope_kernel": ROPE,
    "_rope_gradient_stats_kernel": ROPE,
    "_rope_gradient_kernel": ROPE,
    "_cross_entropy_kernel": LOSS,
    "adamw_kernel": OPTIMIZER,
    "adamw_scalars_kernel": OPTIMIZER,
}
"""The kernels of ``coat_kernels``."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (NCCL, r"^nccl"),
    (COPIES, r"^Memcpy|^Memset|direct_copy|copy_kernel|CatArrayBatchedCopy|FillFunctor"),
    # Before the products: attention is made of CUTLASS, too.
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    # cuBLASLt's letters of the operands: q is E4M3, r is E5M2, t BF16, h FP16, s FP32.
    (FP8_PRODUCTS, r"nvjet_(sm\d+_)?[qr][qr]|gemm_e[45]m[23]|cutlass.*e[45]m[23]|cutlass.*f8"),
    (OTHER_PRODUCTS, r"nvjet_|gemm|gemv|splitk|cutlass|cublas"),
    (LOSS, r"cross_entropy|nll_loss|soft_?max|element_mul"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lpnorm"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta"),
    (ELEMENTWISE, r"elementwise|reduce|^triton_|index|embedding|gather|scatter|_rope|swiglu|scan"),
)


def kind_of(name: str) -> str:
    """The kind of a kernel, copy or memset; ``unknown`` if nothing fits its name."""
    if name in OURS:
        return OURS[name]
    matching = (kind for kind, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE))
    return next(matching, OTHER)


class Interval(NamedTuple):
    """What ran on a stream of the GPU, and when."""

    name: str
    start_us: float
    end_us: float
    stream: tuple[int, int] = (0, 0)
    """Device and stream."""

    @property
    def ms(self) -> float:
        """How long it ran."""
        return (self.end_us - self.start_us) / 1e3


class Total(NamedTuple):
    """Several calls of the same name or kind."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step under the profiler."""

    wall_ms: float
    """From its first line to the end of the GPU's work."""
    gpu: Sequence[Interval]
    """Kernels, copies and memsets; none on a CPU."""
    weights: Sequence[Interval]
    """When a stream was at the quantization of weights, whose kernels also serve gradients."""
    operators: Sequence[Total]
    """Of the CPU, with their own time, without what they called; the longest first."""

    @property
    def busy_ms(self) -> float:
        """Time in which at least one of them ran."""
        busy, until = 0.0, float("-inf")
        for interval in sorted(self.gpu, key=lambda interval: interval.start_us):
            busy += max(0.0, interval.end_us - max(until, interval.start_us))
            until = max(until, interval.end_us)
        return busy / 1e3

    @property
    def launches(self) -> int:
        """Kernels without the driver's copies and memsets."""
        return sum(not interval.name.startswith(("Memcpy", "Memset")) for interval in self.gpu)

    def kinds(self) -> list[Total]:
        """By kind, our FP8 kernels one by one; the longest first. Streams add up."""
        return _totals((self._kind(interval), interval.ms) for interval in self.gpu)

    def kernels(self) -> list[Total]:
        """By name, the longest first."""
        return _totals((interval.name, interval.ms) for interval in self.gpu)

    def waits(self) -> Total:
        """The CPU's waiting for the GPU, with that of the profile at the end of the step."""
        found = [total for total in self.operators if total.name in WAITS]
        return Total("", sum(total.calls for total in found), sum(total.ms for total in found))

    def _kind(self, interval: Interval) -> str:
        kind = kind_of(interval.name)
        if interval.name not in OURS or kind == OPTIMIZER:
            return kind
        if kind == QUANTIZE and any(
            mark.stream == interval.stream
            and mark.start_us <= interval.start_us
            and interval.end_us <= mark.end_us
            for mark in self.weights
        ):
            return WEIGHTS
        return f"{kind}, {interval.name.strip('_').removesuffix('_kernel')}"


def _totals(timed: Iterable[tuple[str, float]]) -> list[Total]:
    sums: dict[str, tuple[int, float]] = {}
    for name, ms in timed:
        calls, total = sums.get(name, (0, 0.0))
        sums[name] = (calls + 1, total + ms)
    found = [Total(name, calls, ms) for name, (calls, ms) in sums.items()]
    return sorted(found, key=lambda total: -total.ms)


def profiled(
    step: Callable[[], object], device: torch.device, trace: Path | None = None
) -> StepProfile:
    """Run a step once under torch's profiler.

    Args:
        step: the work; everything it needs is compiled and warm.
        device: where it runs.
        trace: also write a trace for chrome://tracing or Perfetto, compressed if it ends in .gz.
    """
    activities = [ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        wall_ms = 1e3 * (time.perf_counter() - started)
    if trace is not None:
        unfinished = trace.with_name(f".tmp-{trace.name}")
        recorded.export_chrome_trace(str(unfinished))
        unfinished.replace(trace)
    operators = [
        Total(event.key, event.count, event.self_cpu_time_total / 1e3)
        for event in recorded.key_averages()
        if event.self_cpu_time_total > 0
    ]
    operators.sort(key=lambda total: -total.ms)
    return step_profile(wall_ms, recorded.events() or (), operators)


def step_profile(
    wall_ms: float, events: Iterable[FunctionEvent], operators: Sequence[Total]
) -> StepProfile:
    """A profile of the profiler's events, of which those of the GPU are taken."""
    gpu: list[Interval] = []
    weights: list[Interval] = []
    for event in events:
        if event.device_type != DeviceType.CUDA:
            continue
        interval = Interval(
            event.name,
            event.time_range.start,
            event.time_range.end,
            (event.device_index, event.device_resource_id),
        )
        # Ranges that the CPU named are repeated on the streams of the kernels launched in them.
        if not event.is_user_annotation:
            gpu.append(interval)
        elif event.name == QUANTIZATION:
            weights.append(interval)
    return StepProfile(wall_ms, gpu, weights, operators)


def format_profile(found: StepProfile, median_ms: float | None = None) -> str:
    """The tables of a profile, Markdown.

    Args:
        found: the profile.
        median_ms: of a step without the profiler, where it was measured.
    """
    unprofiled = "" if median_ms is None else f", {median_ms:.1f} ms without the profiler"
    lines = [f"{found.wall_ms:.1f} ms a step{unprofiled}"]
    if not found.gpu:
        lines += ["no GPU ran anything; what the CPU did:", "", _operator_table(found)]
        return "\n".join(lines)
    idle = f"{found.wall_ms - found.busy_ms:.1f} ms idle"
    if median_ms is not None:
        idle += f" (without the profiler {max(0.0, median_ms - found.busy_ms):.1f} ms)"
    waits, transfers = found.waits(), len(found.gpu) - found.launches
    lines += [
        f"GPU: {found.busy_ms:.1f} ms busy, {idle}",
        f"{found.launches} kernels, {transfers} copies and memsets launched",
        f"the CPU waited for the GPU {waits.calls} times (at the end, too), {waits.ms:.1f} ms",
        "",
        gpu_tables(found),
        "",
        _operator_table(found),
    ]
    return "\n".join(lines)


def gpu_tables(found: StepProfile) -> str:
    """The GPU's time by kind, and the longest kernels, Markdown."""
    whole = sum(interval.ms for interval in found.gpu) or 1.0
    named = [total._replace(name=_short(total.name)) for total in found.kernels()[:KERNELS]]
    return "\n\n".join(
        table_of(
            totals,
            {
                head: lambda total: total.name,
                "launches": lambda total: str(total.calls),
                "ms": lambda total: f"{total.ms:.3f}",
                "share": lambda total: f"{total.ms / whole:.1%}",
            },
        )
        for head, totals in (("GPU time", found.kinds()), ("kernel", named))
    )


def _operator_table(found: StepProfile) -> str:
    return table_of(
        found.operators[:OPERATORS],
        {
            "operator (own CPU time)": lambda total: _short(total.name),
            "calls": lambda total: str(total.calls),
            "ms": lambda total: f"{total.ms:.3f}",
        },
    )


def _short(name: str, most: int = 100) -> str:
    """A name that fits a line, as code; bars would end a cell."""
    return f"`{name[:most].replace('|', '/')}`"
