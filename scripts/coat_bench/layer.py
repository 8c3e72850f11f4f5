"""``coat-vlm bench layer``: one block of a known model in our precisions and as baselines.

All implementations have the same weights and the same input in one process. A block whose error
against the BF16 original exceeds :data:`LIMITS` gets no speed.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_bench.profile import format_gpu_tables, profile_step
from coat_bench.rows import (
    Row,
    format_error,
    format_number,
    format_rows_as_table,
    get_origin,
    require_gpu,
)
from coat_bench.shapes import Forward, LayerShape, build_forward, build_layer
from coat_vlm.config import Fp8Config, Fp8Precision
from coat_vlm.fp8 import convert, reused_weights, saved_bytes

LIMITS = (0.09, 0.13)
"""Largest relative errors of the output and of the input gradient."""

REFERENCE = "hf_eager"
"""The implementation that the others are compared with."""

OURS = "coat_"
"""Prefix of the names of our implementations."""

_MIB = 2**20

ATTENTIONS = ("default", "cudnn", "flash")
"""Backends of SDPA; ``default`` leaves the choice to SDPA."""


@dataclass(slots=True)
class LayerRow(Row):
    """One measurement; the columns of ``layer.csv``."""

    shape: str
    tokens: int
    implementation: str
    attention: str
    """One of :data:`ATTENTIONS`."""
    fwd_ms: float | None = None
    fwdbwd_ms: float | None = None
    fwdbwd_cached_ms: float | None = None
    weight_cache_mib: float | None = None
    saved_mib: float | None = None
    peak_mib: float | None = None
    rel_err_out: float | None = None
    rel_err_grad: float | None = None
    length: int = 0
    """Tokens of a sequence, patches of an image."""
    problem: str = ""
    """Why there is no speed."""


class Result(NamedTuple):
    """Output and input gradient of a block, each [batch, length, hidden] on the CPU."""

    output: Tensor
    input_gradient: Tensor


def _compile(layer: nn.Module) -> nn.Module:
    return torch.compile(layer)  # pyright: ignore[reportReturnType] - an OptimizedModule


def _apply_liger(layer: nn.Module) -> nn.Module:
    """Use Liger's norms, and in a decoder layer Liger's SwiGLU."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerLayerNorm,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )

    for name, module in list(layer.named_children()):
        parameter = next(module.parameters())
        if isinstance(module, nn.LayerNorm):
            made = LigerLayerNorm(module.normalized_shape[0], eps=module.eps, bias=True)
        elif hasattr(module, "variance_epsilon"):
            made = LigerRMSNorm(len(parameter), eps=module.variance_epsilon)
        elif hasattr(module, "gate_proj"):
            made = LigerSwiGLUMLP(module.config)
        else:
            continue
        made.to(parameter.device, parameter.dtype).load_state_dict(module.state_dict())
        setattr(layer, name, made)
    return layer


def convert_to_torchao(module: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    """Convert the linear layers of a module to torchao's FP8, in place."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(module, config=config)


def _convert_to(precision: Fp8Precision) -> Callable[[nn.Module], nn.Module]:
    def prepare(layer: nn.Module) -> nn.Module:
        block = nn.ModuleList([layer])  # the block's own class is replaced
        convert(block, Fp8Config().resolved(precision))
        return layer

    return prepare


IMPLEMENTATIONS: dict[str, tuple[str | None, Callable[[nn.Module], nn.Module]]] = {
    REFERENCE: (None, lambda layer: layer),
    "hf_compile": (None, _compile),
    "torchao_tensorwise_compile": ("torchao", lambda layer: _compile(convert_to_torchao(layer))),
    "torchao_rowwise_compile": (
        "torchao",
        lambda layer: _compile(convert_to_torchao(layer, "rowwise")),
    ),
    "liger": ("liger_kernel", _apply_liger),
    "coat_fp8_linear": (None, _convert_to("fp8_linear")),
    "coat_paper": (None, _convert_to("coat")),
    "coat_lean": (None, _convert_to("coat_lean")),
}
"""Name -> (required package, function that converts a layer of transformers)."""


def list_available() -> list[str]:
    """List the implementations whose packages are installed."""
    return [
        name
        for name, (package, _) in IMPLEMENTATIONS.items()
        if package is None or find_spec(package) is not None
    ]


def bench_layer(
    shape: LayerShape,
    implementations: Sequence[str],
    attention: str = "default",
    on_profile: Callable[[str, str], None] | None = None,
) -> list[LayerRow]:
    """Measure implementations of one block, the reference first.

    Args:
        shape: the block and its input.
        implementations: keys of :data:`IMPLEMENTATIONS`; the reference is added in front.
        attention: the backend of SDPA, for all.
        on_profile: called with an implementation's name and its table of GPU kernels.

    Raises:
        ValueError: there is no GPU, an implementation is unknown, or its package is missing.
    """
    names = [REFERENCE, *(name for name in implementations if name != REFERENCE)]
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(
            f"no implementation is called {', '.join(unknown)}; use {', '.join(IMPLEMENTATIONS)}"
        )
    missing = sorted({str(IMPLEMENTATIONS[n][0]) for n in names if n not in list_available()})
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}, or name "
            f"installed implementations: {', '.join(list_available())}"
        )
    require_gpu("speed and memory of a layer are")
    device, dtype = torch.device("cuda"), torch.bfloat16
    original = build_layer(shape, torch.device("cpu"), dtype)
    where = get_origin()
    rows: list[LayerRow] = []
    exact: Result | None = None
    with use_attention(attention):
        for name in names:
            torch.compiler.reset()
            row = LayerRow(*where, shape.name, shape.tokens, name, attention, length=shape.length)
            rows.append(row)
            try:
                layer = IMPLEMENTATIONS[name][1](copy.deepcopy(original).to(device))
                forward = build_forward(shape, layer, device)
                result = run_passes(layer, forward, *make_inputs(shape, device, dtype))
                exact = exact or result
                row.problem = find_disagreement(row, result, exact)
                if not row.problem:
                    measure(row, layer, forward, shape)
                    if name.startswith(OURS):
                        # With FP8 weights from an earlier micro-batch of the step.
                        with reused_weights():
                            row.fwdbwd_cached_ms = measure_times_ms(layer, forward, shape)[1]
                            row.weight_cache_mib = saved_bytes() / _MIB
                    if on_profile is not None:
                        on_profile(name, format_kernel_table(layer, forward, shape))
            except (RuntimeError, ValueError) as error:  # others may run
                if name == REFERENCE:
                    raise
                row.problem = format_error(error)
            layer = forward = None
    return rows


def find_disagreement(row: LayerRow, result: Result, exact: Result) -> str:
    """Write a result's errors into its row; returns the problem if they exceed the limits."""
    row.rel_err_out = relative_error(result.output, exact.output)
    row.rel_err_grad = relative_error(result.input_gradient, exact.input_gradient)
    if row.rel_err_out <= LIMITS[0] and row.rel_err_grad <= LIMITS[1]:  # False if NaN
        return ""
    return f"not correct: errors above {LIMITS[0]} (output) or {LIMITS[1]} (gradient)"


@contextlib.contextmanager
def use_attention(name: str) -> Iterator[None]:
    """Restrict SDPA to one backend, and restore SDPA and its backends afterwards.

    Args:
        name: one of :data:`ATTENTIONS`; ``default`` changes nothing.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r} is not known; use one of {', '.join(ATTENTIONS)}")
    backends = torch.backends.cuda
    before = (backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled())
    sdpa = F.scaled_dot_product_attention
    # Global flags, because torch.compile chooses the backend when it compiles.
    backends.enable_flash_sdp(before[0] if name == "default" else name == "flash")
    backends.enable_cudnn_sdp(before[1] if name == "default" else name == "cudnn")
    try:
        yield
    finally:
        backends.enable_flash_sdp(before[0])
        backends.enable_cudnn_sdp(before[1])
        F.scaled_dot_product_attention = sdpa


def make_inputs(
    shape: LayerShape, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make x and grad_output: [batch, length, hidden], N(0, 1), seed 1."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.length, shape.hidden)
    x, grad_output = (
        torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(2)
    )
    return x.requires_grad_(), grad_output


def run_passes(layer: nn.Module, forward: Forward, x: Tensor, grad_output: Tensor) -> Result:
    """Run one forward and backward pass; clears the gradients."""
    y = forward(x)
    y.backward(grad_output)
    assert x.grad is not None
    result = Result(y.detach().float().cpu(), x.grad.float().cpu())
    _clear_gradients(layer, x)
    return result


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the relative difference to ``exact`` in the Frobenius norm; NaN stays NaN."""
    return ((result - exact).norm() / exact.norm()).item()


def measure(row: LayerRow, layer: nn.Module, forward: Forward, shape: LayerShape) -> None:
    """Write time and memory of a layer on its GPU into a row.

    Raises:
        RuntimeError: out of memory.
    """
    parameter = next(layer.parameters())
    x, grad_output = make_inputs(shape, parameter.device, parameter.dtype)
    for _ in range(2):  # compilation and warm-up
        forward(x).backward(grad_output)
        _clear_gradients(layer, x)
    del x, grad_output
    saved, peak = _measure_memory(layer, forward, shape)
    row.saved_mib, row.peak_mib = saved / _MIB, peak / _MIB
    row.fwd_ms, row.fwdbwd_ms = measure_times_ms(layer, forward, shape)


def measure_times_ms(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[float, float]:
    """Return the median times of the forward pass in training mode, and of both passes.

    Each repetition starts without gradients of input and parameters.
    """
    from triton.testing import do_bench

    parameter = next(layer.parameters())
    x, grad_output = make_inputs(shape, parameter.device, parameter.dtype)
    gradients = [x, *layer.parameters()]

    def both() -> None:
        forward(x).backward(grad_output)

    fwd: Any = do_bench(lambda: forward(x), warmup=100, rep=300, return_mode="median")
    fwdbwd: Any = do_bench(both, warmup=200, rep=600, grad_to_none=gradients, return_mode="median")
    _clear_gradients(layer, x)
    return fwd, fwdbwd


def format_kernel_table(layer: nn.Module, forward: Forward, shape: LayerShape) -> str:
    """Profile a forward and backward pass; formats its GPU time by kind and by kernel."""
    parameter = next(layer.parameters())
    x, grad_output = make_inputs(shape, parameter.device, parameter.dtype)
    forward(x).backward(grad_output)
    _clear_gradients(layer, x)
    found = profile_step(lambda: forward(x).backward(grad_output), parameter.device)
    _clear_gradients(layer, x)
    return f"{found.busy_ms:.2f} ms on the GPU\n\n{format_gpu_tables(found)}"


def _measure_memory(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[int, int]:
    """Return the bytes saved between the passes, without input and output, and the peak memory.

    Both count from the state in which only the parameters are allocated.
    """
    parameter = next(layer.parameters())
    gc.collect()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    x, grad_output = make_inputs(shape, parameter.device, parameter.dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(grad_output)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resident
    _clear_gradients(layer, x)
    return saved, peak


def _clear_gradients(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)


def format_rows(rows: Sequence[LayerRow]) -> str:
    """Format rows as a Markdown table; speeds are relative to the first implementation."""
    first = rows[0].fwdbwd_ms

    def speed(row: LayerRow) -> str:
        return format_number(first / row.fwdbwd_ms if first and row.fwdbwd_ms else None, 2, "x")

    return format_rows_as_table(
        rows,
        {
            "implementation": lambda row: row.implementation,
            "fwd ms": lambda row: format_number(row.fwd_ms, 2),
            "fwd+bwd ms": lambda row: format_number(row.fwdbwd_ms, 2),
            "speed": speed,
            "cached weights ms": lambda row: format_number(row.fwdbwd_cached_ms, 2),
            "saved MiB": lambda row: format_number(row.saved_mib, 0),
            "peak MiB": lambda row: format_number(row.peak_mib, 0),
            "cached weights MiB": lambda row: format_number(row.weight_cache_mib, 0),
            "error: output": lambda row: format_number(row.rel_err_out, 4),
            "input gradient": lambda row: format_number(row.rel_err_grad, 4),
            "note": lambda row: row.problem,
        },
    )
