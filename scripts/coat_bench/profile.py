"""Profiles a training step: GPU kernels, GPU idle time, and CPU operators.

The data come from torch's profiler. The GPU is *busy* while at least one kernel, copy or memset
runs on any of its streams (the union of their intervals), and *idle* for the rest of the step,
mainly because the CPU has not launched the next kernel yet. NCCL kernels count as busy while they
wait for other ranks. The profiler costs CPU time per operator and launch, so idle time is also
given for the step without the profiler.

Kernels are classified by name. Our kernels are listed one by one, so a new kernel must be added to
:data:`OURS`. The patterns for all other kernels are the names of cuBLASLt, CUTLASS, cuDNN, torch's
flash attention, ATen, Liger, DeepSpeed, torchao and NCCL in traces of Hopper GPUs.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from coat_bench.rows import format_rows_as_table
from coat_vlm.fp8.weights import QUANTIZATION

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls in which the CPU waits for the GPU."""

KERNELS = 25
"""Number of lines in the table of kernels."""

OPERATORS = 15
"""Number of lines in the table of operators."""

FP8_GEMMS = "FP8 GEMMs"
OTHER_GEMMS = "GEMMs in BF16, FP16 or FP32"
ATTENTION = "attention"
WEIGHTS = "quantization of weights"
LOSS = "loss"
NORMS = "other norms"
OPTIMIZER = "optimizer and clipping"
COPIES = "copies and memsets"
NCCL = "NCCL"
ELEMENTWISE = "other element-wise ops and sums"
OTHER = "unknown"

QUANTIZE, GROUPS = "FP8: quantize", "FP8: quantize by group"
LOW_RANK = "LoRA: projections, gradients of B"
FP8_NORM, ACTIVATION, ROPE = "FP8: norm", "FP8: activation", "FP8: rotation"

OURS: dict[str, str] = {
    "_amax_kernel": QUANTIZE,
    "quantize_tensor_kernel": QUANTIZE,
    "_transpose_quantized_kernel": QUANTIZE,
    "_dequantize_tensor_kernel": QUANTIZE,
    "_quantize_group_kernel": GROUPS,
    "_dequantize_group_kernel": GROUPS,
    "_norm_stats_kernel": FP8_NORM,
    "_norm_apply_kernel": FP8_NORM,
    "_norm_bwd_kernel": FP8_NORM,
    "_activation_stats_kernel": ACTIVATION,
    "_activation_apply_kernel": ACTIVATION,
    "_activation_bwd_stats_kernel": ACTIVATION,
    "_activation_bwd_apply_kernel": ACTIVATION,
    "_activation_again_kernel": ACTIVATION,
    "_rope_kernel": ROPE,
    "_rope_gradient_stats_kernel": ROPE,
    "_rope_gradient_kernel": ROPE,
    "_head_norm_kernel": ROPE,
    "_head_norm_bwd_kernel": ROPE,
    "_low_rank_project_kernel": LOW_RANK,
    "_low_rank_gradient_kernel": LOW_RANK,
    "_cross_entropy_kernel": LOSS,
    "_logit_gradient_kernel": LOSS,
    "adamw_kernel": OPTIMIZER,
    "adamw_scalars_kernel": OPTIMIZER,
}
"""The kernels of ``coat_kernels``."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (NCCL, r"^nccl"),
    (COPIES, r"^Memcpy|^Memset|direct_copy|copy_kernel|CatArrayBatchedCopy|FillFunctor"),
    # Before the GEMMs: attention kernels use CUTLASS, too.
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    # cuBLASLt's letters of operand dtypes: q E4M3, r E5M2, t BF16, h FP16, s FP32.
    (FP8_GEMMS, r"nvjet_(sm\d+_)?[qr][qr]|gemm_e[45]m[23]|cutlass.*e[45]m[23]|cutlass.*f8"),
    (OTHER_GEMMS, r"nvjet_|gemm|gemv|splitk|cutlass|cublas"),
    (LOSS, r"cross_entropy|nll_loss|soft_?max|element_mul"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lpnorm"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta"),
    (ELEMENTWISE, r"elementwise|reduce|^triton_|index|embedding|gather|scatter|_rope|swiglu|scan"),
)


def classify_kernel(name: str) -> str:
    """Return the kind of a kernel, copy or memset; ``unknown`` if no pattern matches its name."""
    if name in OURS:
        return OURS[name]
    matching = (kind for kind, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE))
    return next(matching, OTHER)


class Interval(NamedTuple):
    """A kernel, copy or memset on a stream of the GPU."""

    name: str
    start_us: float
    end_us: float
    stream: tuple[int, int] = (0, 0)
    """Device and stream."""

    @property
    def ms(self) -> float:
        """Duration in milliseconds."""
        return (self.end_us - self.start_us) / 1e3


class Total(NamedTuple):
    """Number and total time of calls with the same name or kind."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step under the profiler."""

    wall_ms: float
    """Time from the first line to the end of the GPU's work."""
    gpu: Sequence[Interval]
    """Kernels, copies and memsets; none on a CPU."""
    weights: Sequence[Interval]
    """Intervals in which a stream quantized weights; the same kernels also quantize gradients."""
    operators: Sequence[Total]
    """CPU operators with their self time, the longest first."""

    @property
    def busy_ms(self) -> float:
        """Time in which at least one interval of ``gpu`` ran."""
        busy, until = 0.0, float("-inf")
        for interval in sorted(self.gpu, key=lambda interval: interval.start_us):
            busy += max(0.0, interval.end_us - max(until, interval.start_us))
            until = max(until, interval.end_us)
        return busy / 1e3

    @property
    def launches(self) -> int:
        """Number of kernels, without the driver's copies and memsets."""
        return sum(not interval.name.startswith(("Memcpy", "Memset")) for interval in self.gpu)

    def sum_by_kind(self) -> list[Total]:
        """Sum by kind, our FP8 kernels one by one; the longest first. Streams are added."""
        return _sum_by_name((self._classify(interval), interval.ms) for interval in self.gpu)

    def sum_waits(self) -> Total:
        """Sum the CPU's waits for the GPU, including the profiler's wait at the end of the step."""
        found = [total for total in self.operators if total.name in WAITS]
        return Total("", sum(total.calls for total in found), sum(total.ms for total in found))

    def _classify(self, interval: Interval) -> str:
        kind = classify_kernel(interval.name)
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


def _sum_by_name(timed: Iterable[tuple[str, float]]) -> list[Total]:
    sums: dict[str, tuple[int, float]] = {}
    for name, ms in timed:
        calls, total = sums.get(name, (0, 0.0))
        sums[name] = (calls + 1, total + ms)
    found = [Total(name, calls, ms) for name, (calls, ms) in sums.items()]
    return sorted(found, key=lambda total: -total.ms)


def profile_step(step: Callable[[], object], device: torch.device) -> StepProfile:
    """Run a step once under torch's profiler.

    Args:
        step: the step, compiled and warmed up.
        device: its device.
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
    operators = [
        Total(event.key, event.count, event.self_cpu_time_total / 1e3)
        for event in recorded.key_averages()
        if event.self_cpu_time_total > 0
    ]
    operators.sort(key=lambda total: -total.ms)
    return collect_profile(wall_ms, recorded.events() or (), operators)


def collect_profile(
    wall_ms: float, events: Iterable[FunctionEvent], operators: Sequence[Total]
) -> StepProfile:
    """Build a profile from the profiler's events; events of the CPU are ignored."""
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
        # Ranges named on the CPU appear again on the streams of the kernels launched in them.
        if not event.is_user_annotation:
            gpu.append(interval)
        elif event.name == QUANTIZATION:
            weights.append(interval)
    return StepProfile(wall_ms, gpu, weights, operators)


def format_profile(found: StepProfile, median_ms: float | None = None) -> str:
    """Format the tables of a profile in Markdown.

    Args:
        found: the profile.
        median_ms: median time of a step without the profiler, if it was measured.
    """
    unprofiled = "" if median_ms is None else f", {median_ms:.1f} ms without the profiler"
    lines = [f"{found.wall_ms:.1f} ms a step{unprofiled}"]
    operators = format_rows_as_table(
        found.operators[:OPERATORS],
        {
            "operator (own CPU time)": lambda total: _shorten(total.name),
            "calls": lambda total: str(total.calls),
            "ms": lambda total: f"{total.ms:.3f}",
        },
    )
    if not found.gpu:
        return "\n".join([*lines, "the GPU ran nothing; CPU operators:", "", operators])
    idle = f"{found.wall_ms - found.busy_ms:.1f} ms idle"
    if median_ms is not None:
        idle += f" (without the profiler {max(0.0, median_ms - found.busy_ms):.1f} ms)"
    waits, transfers = found.sum_waits(), len(found.gpu) - found.launches
    lines += [
        f"GPU: {found.busy_ms:.1f} ms busy, {idle}",
        f"{found.launches} kernels, {transfers} copies and memsets launched",
        f"the CPU waited for the GPU {waits.calls} times (at the end, too), {waits.ms:.1f} ms",
        "",
        format_gpu_tables(found),
        "",
        operators,
    ]
    return "\n".join(lines)


def format_gpu_tables(found: StepProfile) -> str:
    """Format the GPU time by kind, and the longest kernels, in Markdown."""
    whole = sum(interval.ms for interval in found.gpu) or 1.0
    kernels = _sum_by_name((interval.name, interval.ms) for interval in found.gpu)
    named = [total._replace(name=_shorten(total.name)) for total in kernels[:KERNELS]]
    return "\n\n".join(
        format_rows_as_table(
            totals,
            {
                head: lambda total: total.name,
                "launches": lambda total: str(total.calls),
                "ms": lambda total: f"{total.ms:.3f}",
                "share": lambda total: f"{total.ms / whole:.1%}",
            },
        )
        for head, totals in (("GPU time", found.sum_by_kind()), ("kernel", named))
    )


def _shorten(name: str, most: int = 100) -> str:
    """Shorten a name and format it as code; bars would end a cell of the table."""
    return f"`{name[:most].replace('|', '/')}`"
