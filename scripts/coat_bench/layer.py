"""``coat-vlm bench layer``: one block of a known model in our precisions and in the baselines'.

All implementations start from the same weights and see the same input in one process. A block that
is further from the BF16 original than :data:`LIMITS` gets no speed.
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

from coat_bench.profile import gpu_tables, profiled
from coat_bench.rows import Row, failure, number, origin, require_gpu, table_of
from coat_bench.shapes import Forward, LayerShape, build_layer, forward_of
from coat_vlm.config import Fp8Config, Fp8Precision
from coat_vlm.fp8 import convert, kept_bytes, reused_weights

LIMITS = (0.09, 0.13)
"""Largest relative error of the output and of the input gradient that is called correct."""

REFERENCE = "hf_eager"
"""The implementation that the others are compared with."""

OURS = "coat_"
"""How the names of our implementations begin."""

_MIB = 2**20

Attention = str
"""``default`` (what SDPA chooses), ``cudnn`` or ``flash``."""

ATTENTIONS = ("default", "cudnn", "flash")


@dataclass(slots=True)
class LayerRow(Row):
    """One measurement; the columns of ``layer.csv``."""

    shape: str
    tokens: int
    implementation: str
    attention: Attention
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
    """What a block computes."""

    output: Tensor
    """[batch, length, hidden], on the CPU."""
    input_gradient: Tensor
    """The same shape."""


def _compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer)  # pyright: ignore[reportReturnType] - an OptimizedModule


def _liger(layer: nn.Module) -> nn.Module:
    """Liger's norms and SwiGLU in a decoder layer, its norms in an encoder layer."""
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


def torchao_float8(module: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    """Convert the linear layers of a module to torchao's FP8, in place."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(module, config=config)


def _ours(precision: Fp8Precision) -> Callable[[nn.Module], nn.Module]:
    def prepare(layer: nn.Module) -> nn.Module:
        block = nn.ModuleList([layer])  # the block's own class is replaced
        convert(block, Fp8Config().resolved(precision))
        return layer

    return prepare


IMPLEMENTATIONS: dict[str, tuple[str | None, Callable[[nn.Module], nn.Module]]] = {
    REFERENCE: (None, lambda layer: layer),
    "hf_compile": (None, _compiled),
    "torchao_tensorwise_compile": ("torchao", lambda layer: _compiled(torchao_float8(layer))),
    "torchao_rowwise_compile": (
        "torchao",
        lambda layer: _compiled(torchao_float8(layer, "rowwise")),
    ),
    "liger": ("liger_kernel", _liger),
    "coat_fp8_linear": (None, _ours("fp8_linear")),
    "coat_paper": (None, _ours("coat")),
    "coat_lean": (None, _ours("coat_lean")),
}
"""Name -> (package it needs, what makes it of a layer of transformers)."""


def available() -> list[str]:
    """The implementations whose packages are installed."""
    return [
        name
        for name, (package, _) in IMPLEMENTATIONS.items()
        if package is None or find_spec(package) is not None
    ]


def bench_layer(
    shape: LayerShape,
    implementations: Sequence[str],
    attention: Attention = "default",
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
    _check(names)
    device, dtype = torch.device("cuda"), torch.bfloat16
    original = build_layer(shape, torch.device("cpu"), dtype)
    where = origin()
    rows: list[LayerRow] = []
    exact: Result | None = None
    with attention_backend(attention):
        for name in names:
            torch.compiler.reset()
            row = LayerRow(*where, shape.name, shape.tokens, name, attention, length=shape.length)
            rows.append(row)
            try:
                layer = IMPLEMENTATIONS[name][1](copy.deepcopy(original).to(device))
                forward = forward_of(shape, layer, device)
                result = compute(layer, forward, *inputs(shape, device, dtype))
                exact = exact or result
                row.problem = disagreement(row, result, exact)
                if not row.problem:
                    measure(row, layer, forward, shape)
                    if name.startswith(OURS):
                        # With FP8 weights that an earlier micro-batch of the step left.
                        with reused_weights():
                            row.fwdbwd_cached_ms = times_ms(layer, forward, shape)[1]
                            row.weight_cache_mib = kept_bytes() / _MIB
                    if on_profile is not None:
                        on_profile(name, kernel_table(layer, forward, shape))
            except (RuntimeError, ValueError) as error:  # others may run
                if name == REFERENCE:
                    raise
                row.problem = failure(error)
            layer = forward = None
    return rows


def disagreement(row: LayerRow, result: Result, exact: Result) -> str:
    """Note a result's errors in its row; says whether they are above the limits, or nothing."""
    row.rel_err_out = relative_error(result.output, exact.output)
    row.rel_err_grad = relative_error(result.input_gradient, exact.input_gradient)
    if row.rel_err_out <= LIMITS[0] and row.rel_err_grad <= LIMITS[1]:  # False for NaN
        return ""
    return f"not correct: errors above {LIMITS[0]} (output) or {LIMITS[1]} (gradient)"


def _check(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(
            f"no implementation is called {', '.join(unknown)}; use {', '.join(IMPLEMENTATIONS)}"
        )
    missing = sorted({str(IMPLEMENTATIONS[n][0]) for n in names if n not in available()})
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}, or name "
            f"implementations that are here: {', '.join(available())}"
        )
    require_gpu("speed and memory of a layer are")


@contextlib.contextmanager
def attention_backend(name: Attention) -> Iterator[None]:
    """Let SDPA use one backend only.

    Args:
        name: one of :data:`ATTENTIONS`; ``default`` changes nothing. What the code inside sets is
            put back, too.

    Raises:
        ValueError: it is none of them.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r} is not known; use one of {', '.join(ATTENTIONS)}")
    backends = torch.backends.cuda
    before = (backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled())
    # Set for good while it is traced: torch.compile chooses the backend when it compiles.
    backends.enable_flash_sdp(before[0] if name == "default" else name == "flash")
    backends.enable_cudnn_sdp(before[1] if name == "default" else name == "cudnn")
    try:
        yield
    finally:
        backends.enable_flash_sdp(before[0])
        backends.enable_cudnn_sdp(before[1])


def inputs(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """X and dy, [batch, length, hidden], N(0, 1), seed 1."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.length, shape.hidden)
    x, dy = (
        torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(2)
    )
    return x.requires_grad_(), dy


def compute(layer: nn.Module, forward: Forward, x: Tensor, dy: Tensor) -> Result:
    """One forward and backward pass; leaves no gradients behind."""
    y = forward(x)
    y.backward(dy)
    assert x.grad is not None
    result = Result(y.detach().float().cpu(), x.grad.float().cpu())
    _forget(layer, x)
    return result


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference, divided by that of ``exact``; NaN stays NaN."""
    return ((result - exact).norm() / exact.norm()).item()


def measure(row: LayerRow, layer: nn.Module, forward: Forward, shape: LayerShape) -> None:
    """Fill a row with time and memory of a layer on its GPU.

    Raises:
        RuntimeError: out of memory.
    """
    parameter = next(layer.parameters())
    x, dy = inputs(shape, parameter.device, parameter.dtype)
    for _ in range(2):  # compiles and warms up
        forward(x).backward(dy)
        _forget(layer, x)
    del x, dy
    saved, peak = _memory(layer, forward, shape)
    row.saved_mib, row.peak_mib = saved / _MIB, peak / _MIB
    row.fwd_ms, row.fwdbwd_ms = times_ms(layer, forward, shape)


def times_ms(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[float, float]:
    """Medians of the forward pass in training mode, and of both passes.

    In each repetition the gradients of input and parameters are made anew.
    """
    from triton.testing import do_bench

    parameter = next(layer.parameters())
    x, dy = inputs(shape, parameter.device, parameter.dtype)
    gradients = [x, *layer.parameters()]

    def both() -> None:
        forward(x).backward(dy)

    fwd: Any = do_bench(lambda: forward(x), warmup=100, rep=300, return_mode="median")
    fwdbwd: Any = do_bench(both, warmup=200, rep=600, grad_to_none=gradients, return_mode="median")
    _forget(layer, x)
    return fwd, fwdbwd


def kernel_table(layer: nn.Module, forward: Forward, shape: LayerShape) -> str:
    """Where the time of a forward and backward pass goes on the GPU: by kind, and by kernel."""
    parameter = next(layer.parameters())
    x, dy = inputs(shape, parameter.device, parameter.dtype)
    forward(x).backward(dy)
    _forget(layer, x)
    found = profiled(lambda: forward(x).backward(dy), parameter.device)
    _forget(layer, x)
    return f"{found.busy_ms:.2f} ms on the GPU\n\n{gpu_tables(found)}"


def _memory(layer: nn.Module, forward: Forward, shape: LayerShape) -> tuple[int, int]:
    """Bytes saved between the passes, without the input and the output; and the highest memory.

    Both are above the state in which only the parameters are there.
    """
    parameter = next(layer.parameters())
    gc.collect()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    x, dy = inputs(shape, parameter.device, parameter.dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resident
    _forget(layer, x)
    return saved, peak


def _forget(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)


def format_rows(rows: Sequence[LayerRow]) -> str:
    """Markdown: one line per implementation, times as ratios to the first."""
    first = rows[0].fwdbwd_ms

    def speed(row: LayerRow) -> str:
        return number(first / row.fwdbwd_ms if first and row.fwdbwd_ms else None, 2, "x")

    return table_of(
        rows,
        {
            "implementation": lambda row: row.implementation,
            "fwd ms": lambda row: number(row.fwd_ms, 2),
            "fwd+bwd ms": lambda row: number(row.fwdbwd_ms, 2),
            "speed": speed,
            "weights kept ms": lambda row: number(row.fwdbwd_cached_ms, 2),
            "saved MiB": lambda row: number(row.saved_mib, 0),
            "peak MiB": lambda row: number(row.peak_mib, 0),
            "kept weights MiB": lambda row: number(row.weight_cache_mib, 0),
            "error: output": lambda row: number(row.rel_err_out, 4),
            "input gradient": lambda row: number(row.rel_err_grad, 4),
            "note": lambda row: row.problem,
        },
    )
