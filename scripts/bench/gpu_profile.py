"""Profiles a training step: GPU kernels, GPU idle time, and CPU operators.

The data come from torch's profiler. The GPU is *busy* while at least one kernel, copy or memset
runs on any of its streams (the union of their intervals), and *idle* for the rest of the step,
mainly because the CPU has not launched the next kernel yet. NCCL kernels count as busy while they
wait for other ranks. The profiler costs CPU time per operator and launch, so idle time is also
given for the step without the profiler.

Kernels are classified by name: those of ``coat_kernels``, and those of cuBLASLt, CUTLASS, cuDNN,
torch's flash attention, ATen, Liger, DeepSpeed, torchao and NCCL in traces of Hopper GPUs.
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

from coat_vlm.fp8.weights import QUANTIZATION
from harness import format_results

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls in which the CPU waits for the GPU."""

KERNELS = 25
"""Number of lines in the table of kernels."""

OPERATORS = 15
"""Number of lines in the table of operators."""

QUANTIZE, OPTIMIZER, WEIGHTS = "FP8: quantize", "optimizer and clipping", "quantization of weights"

_PATTERNS: tuple[tuple[str, str], ...] = (
    # coat_kernels
    ("FP8: quantize by group", r"^_(de)?quantize_group_kernel$"),
    (QUANTIZE, r"^(_amax|_transpose_quantized|(_de)?quantize_tensor)_kernel$"),
    ("FP8: norm", r"^_norm_\w+_kernel$"),
    ("FP8: activation", r"^_activation_\w+_kernel$"),
    ("FP8: rotation", r"^(_rope|_rope_gradient\w*|_head_norm|_head_norm_bwd)_kernel$"),
    ("LoRA: projections, gradients of B", r"^_low_rank_\w+_kernel$"),
    ("loss", r"^(_cross_entropy|_logit_gradient)_kernel$"),
    (OPTIMIZER, r"^adamw_(scalars_)?kernel$"),
    # other libraries
    ("NCCL", r"^nccl"),
    (
        "copies and memsets",
        r"^Memcpy|^Memset|direct_copy|copy_kernel|CatArrayBatchedCopy|FillFunctor",
    ),
    # Before the GEMMs: attention kernels also use CUTLASS.
    ("attention", r"flash|fmha|sdpa|attention"),
    # cuBLASLt's letters of operand dtypes: q E4M3, r E5M2, t BF16, h FP16, s FP32.
    ("FP8 GEMMs", r"nvjet_(sm\d+_)?[qr][qr]|gemm_e[45]m[23]|cutlass.*e[45]m[23]|cutlass.*f8"),
    ("GEMMs in BF16, FP16 or FP32", r"nvjet_|gemm|gemv|splitk|cutlass|cublas"),
    ("loss", r"cross_entropy|nll_loss|soft_?max|element_mul"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lpnorm"),
    ("other norms", r"layer_?norm|rms_?norm|GammaBeta"),
    (
        "other element-wise ops and sums",
        r"elementwise|reduce|^triton_|index|embedding|gather|scatter|_rope|swiglu|scan",
    ),
)


def classify_kernel(name: str) -> str:
    """Return the kind of a kernel, copy or memset; ``unknown`` if no pattern matches its name."""
    matching = (kind for kind, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE))
    return next(matching, "unknown")


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
        waits = [total for total in self.operators if total.name in WAITS]
        return Total("", sum(total.calls for total in waits), sum(total.ms for total in waits))

    def _classify(self, interval: Interval) -> str:
        kind = classify_kernel(interval.name)
        if not kind.startswith(("FP8: ", "LoRA: ")):
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
    totals = [Total(name, calls, ms) for name, (calls, ms) in sums.items()]
    return sorted(totals, key=lambda total: -total.ms)


def profile_step(step: Callable[[], object], device: torch.device) -> StepProfile:
    """Run a step, which is compiled and warmed up, once under torch's profiler."""
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


def format_profile(result: StepProfile, median_ms: float) -> str:
    """Format the tables of a profile; ``median_ms`` is a step's time without the profiler."""
    lines = [f"{result.wall_ms:.1f} ms a step, {median_ms:.1f} ms without the profiler"]
    operators = format_results(
        result.operators[:OPERATORS],
        {
            "operator (own CPU time)": lambda total: _shorten(total.name),
            "calls": lambda total: str(total.calls),
            "ms": lambda total: f"{total.ms:.3f}",
        },
    )
    if not result.gpu:
        return "\n".join([*lines, "the GPU ran nothing; CPU operators:", "", operators])
    idle = f"{result.wall_ms - result.busy_ms:.1f} ms idle"
    idle += f" (without the profiler {max(0.0, median_ms - result.busy_ms):.1f} ms)"
    waits, transfers = result.sum_waits(), len(result.gpu) - result.launches
    lines += [
        f"GPU: {result.busy_ms:.1f} ms busy, {idle}",
        f"{result.launches} kernels, {transfers} copies and memsets launched",
        f"the CPU waited for the GPU {waits.calls} times (including the end), {waits.ms:.1f} ms",
        "",
        format_gpu_tables(result),
        "",
        operators,
    ]
    return "\n".join(lines)


def format_gpu_tables(result: StepProfile) -> str:
    """Format the GPU time by kind, and the longest kernels, in Markdown."""
    whole = sum(interval.ms for interval in result.gpu) or 1.0
    kernels = _sum_by_name((interval.name, interval.ms) for interval in result.gpu)
    named = [total._replace(name=_shorten(total.name)) for total in kernels[:KERNELS]]
    return "\n\n".join(
        format_results(
            totals,
            {
                head: lambda total: total.name,
                "launches": lambda total: str(total.calls),
                "ms": lambda total: f"{total.ms:.3f}",
                "share": lambda total: f"{total.ms / whole:.1%}",
            },
        )
        for head, totals in (("GPU time", result.sum_by_kind()), ("kernel", named))
    )


def _shorten(name: str, most: int = 100) -> str:
    """Shorten a name and format it as code; bars would end a cell of the table."""
    return f"`{name[:most].replace('|', '/')}`"
