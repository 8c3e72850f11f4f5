"""Time and memory of one forward and backward pass on a GPU."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_bench.profile import gpu_tables, profiled
from coat_bench.shapes import Forward, LayerShape

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Result:
    """What a block computes."""

    output: Tensor
    """[batch, length, hidden], on the CPU."""
    input_gradient: Tensor
    """The same shape."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block costs."""

    fwd_ms: float
    """Forward pass in training mode, median."""
    fwdbwd_ms: float
    """Forward and backward pass, gradients of input and parameters made anew, median."""
    saved_mib: float
    """Memory kept between the passes, without the input and the output."""
    peak_mib: float
    """Highest memory of both passes above the state in which only the parameters are there."""


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


def cost(layer: nn.Module, forward: Forward, shape: LayerShape) -> Cost:
    """Measure a layer on its GPU, after the passes that compile and warm up.

    Raises:
        RuntimeError: out of memory.
    """
    from triton.testing import do_bench

    parameter = next(layer.parameters())
    device, dtype = parameter.device, parameter.dtype
    x, dy = inputs(shape, device, dtype)
    for _ in range(2):
        forward(x).backward(dy)
        _forget(layer, x)
    del x, dy
    saved, peak = _memory(layer, forward, lambda: inputs(shape, device, dtype))
    x, dy = inputs(shape, device, dtype)
    gradients = [x, *layer.parameters()]

    def both() -> None:
        forward(x).backward(dy)

    fwd: Any = do_bench(lambda: forward(x), warmup=100, rep=300, return_mode="median")
    fwdbwd: Any = do_bench(both, warmup=200, rep=600, grad_to_none=gradients, return_mode="median")
    _forget(layer, x)
    return Cost(fwd, fwdbwd, saved / _MIB, peak / _MIB)


def kernel_table(layer: nn.Module, forward: Forward, shape: LayerShape) -> str:
    """Where the time of a forward and backward pass goes on the GPU: by kind, and by kernel."""
    parameter = next(layer.parameters())
    x, dy = inputs(shape, parameter.device, parameter.dtype)
    forward(x).backward(dy)
    _forget(layer, x)
    found = profiled(lambda: forward(x).backward(dy), parameter.device)
    _forget(layer, x)
    return f"{found.busy_ms:.2f} ms on the GPU\n\n{gpu_tables(found)}"


def _memory(
    layer: nn.Module, forward: Forward, make: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[int, int]:
    """Bytes kept between the passes, and the peak, above what is allocated now."""
    gc.collect()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    x, dy = make()
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
