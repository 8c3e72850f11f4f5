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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from coat_vlm.fp8.weights import QUANTIZATION
from harness import format_table

KERNELS, OPERATORS = 25, 15  # lines of the tables
QUANTIZE = "FP8: quantize"

_PATTERNS: tuple[tuple[str, str], ...] = (
    # coat_kernels
    ("FP8: quantize by group", r"^_(de)?quantize_group_kernel$"),
    (QUANTIZE, r"^(_amax|_transpose_quantized|(_de)?quantize_tensor)_kernel$"),
    ("FP8: norm", r"^_norm_\w+_kernel$"),
    ("FP8: activation", r"^_activation_\w+_kernel$"),
    ("FP8: rotation", r"^(_rope|_rope_gradient\w*|_head_norm|_head_norm_bwd)_kernel$"),
    ("LoRA: projections, gradients of B", r"^_low_rank_\w+_kernel$"),
    ("loss", r"^(_cross_entropy|_logit_gradient)_kernel$"),
    ("optimizer and clipping", r"^adamw_(scalars_)?kernel$"),
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
    ("optimizer and clipping", r"multi_tensor_apply|adam|lpnorm"),
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


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step under the profiler."""

    wall_ms: float
    """Time from the first line to the end of the GPU's work."""
    gpu: Sequence[Interval]
    """Kernels, copies and memsets; none on a CPU."""
    weights: Sequence[Interval]
    """Intervals in which a stream quantized weights; the same kernels also quantize gradients."""
    operators: str = ""
    """torch's table of CPU operators, including waits for the GPU."""

    @property
    def busy_ms(self) -> float:
        """Time in which at least one interval of ``gpu`` ran."""
        busy, until = 0.0, float("-inf")
        for interval in sorted(self.gpu, key=lambda interval: interval.start_us):
            busy += max(0.0, interval.end_us - max(until, interval.start_us))
            until = max(until, interval.end_us)
        return busy / 1e3

    def classify(self, interval: Interval) -> str:
        """Return the kind of an interval, with the kernel's name for our FP8 kernels."""
        kind = classify_kernel(interval.name)
        if not kind.startswith(("FP8: ", "LoRA: ")):
            return kind
        if kind == QUANTIZE and any(
            mark.stream == interval.stream
            and mark.start_us <= interval.start_us
            and interval.end_us <= mark.end_us
            for mark in self.weights
        ):
            return "quantization of weights"
        return f"{kind}, {interval.name.strip('_').removesuffix('_kernel')}"


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
    averages = recorded.key_averages()
    table = averages.table(sort_by="self_cpu_time_total", row_limit=OPERATORS)
    return collect_profile(wall_ms, recorded.events() or (), table)


def collect_profile(
    wall_ms: float, events: Iterable[FunctionEvent], operators: str = ""
) -> StepProfile:
    """Build a profile from the profiler's events; events of the CPU are ignored."""
    gpu: list[Interval] = []
    weights: list[Interval] = []
    for event in events:
        if event.device_type != DeviceType.CUDA:
            continue
        times, stream = event.time_range, (event.device_index, event.device_resource_id)
        interval = Interval(event.name, times.start, times.end, stream)
        # Ranges named on the CPU appear again on the streams of the kernels launched in them.
        if not event.is_user_annotation:
            gpu.append(interval)
        elif event.name == QUANTIZATION:
            weights.append(interval)
    return StepProfile(wall_ms, gpu, weights, operators)


def format_profile(result: StepProfile, median_ms: float) -> str:
    """Format the tables of a profile; ``median_ms`` is a step's time without the profiler."""
    lines = [f"{result.wall_ms:.1f} ms a step, {median_ms:.1f} ms without the profiler"]
    if result.gpu:
        idle, unprofiled = result.wall_ms - result.busy_ms, max(0.0, median_ms - result.busy_ms)
        lines += [
            f"GPU: {result.busy_ms:.1f} ms busy, {idle:.1f} ms idle (without the profiler "
            f"{unprofiled:.1f} ms); {len(result.gpu)} kernels, copies and memsets",
            "",
            format_gpu_tables(result),
        ]
    return "\n".join([*lines, "", result.operators])


def format_gpu_tables(result: StepProfile) -> str:
    """Format the GPU time by kind, and the longest kernels, in Markdown; streams are added."""
    tables = []
    names = [f"`{interval.name[:100].replace('|', '/')}`" for interval in result.gpu]
    kinds = [result.classify(interval) for interval in result.gpu]
    for head, labels, most in (("GPU time", kinds, len(kinds)), ("kernel", names, KERNELS)):
        launches, total = Counter(labels), dict.fromkeys(labels, 0.0)
        for label, interval in zip(labels, result.gpu, strict=True):
            total[label] += (interval.end_us - interval.start_us) / 1e3
        whole = sum(total.values()) or 1.0
        longest = sorted(total, key=lambda label: -total[label])[:most]
        lines = [
            [label, str(launches[label]), f"{total[label]:.3f}", f"{total[label] / whole:.1%}"]
            for label in longest
        ]
        tables.append(format_table([head, "launches", "ms", "share"], lines))
    return "\n\n".join(tables)
