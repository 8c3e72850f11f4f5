"""Compares FP8 blocks with the same blocks in BF16.

A block returns x + f(x), which is mostly x. The error is relative to f(x). The input's gradient is
g + (df/dx)^T g with the output's gradient g, and its error is relative to what the block adds to g:

    output error         = |y_fp8 - y_bf16| / |y_bf16 - x|
    input gradient error = |grad_x_fp8 - grad_x_bf16| / |grad_x_bf16 - g|

Copies of the block without hooks run in evaluation mode: no dropout, weight gradient or collective.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coat_vlm.fp8.convert import back_to_bf16
from coat_vlm.fp8.cuda_graphs import FORWARD
from coat_vlm.fp8.saturation import watching


@dataclass(slots=True)
class BlockError:
    """Sums over one or more inputs, and the errors computed from them."""

    output: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Squared norms of the difference, and of what the block adds in BF16."""
    gradient: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The same for the input's gradient; zeros without a gradient."""
    counts: dict[str, list[float]] = field(default_factory=dict)
    """Kind of tensor -> values, saturated, underflowed (:mod:`coat_vlm.fp8.saturation`)."""

    def add(self, other: "BlockError") -> None:
        """Add the sums of other inputs."""
        self.output = _add(self.output, other.output)
        self.gradient = _add(self.gradient, other.gradient)
        for name, sums in other.counts.items():
            self.counts[name] = _add(self.counts.get(name, [0.0] * 3), sums)

    @property
    def output_error(self) -> float | None:
        """Relative error of the output; None if nothing was compared, NaN if FP8 returned NaN."""
        return _relative(self.output)

    @property
    def input_gradient_error(self) -> float | None:
        """Relative error of the input's gradient; None if no gradient reached the block."""
        return _relative(self.gradient)

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """Shares that saturated and underflowed, per kind of tensor."""
        return {
            name: {"saturated": saturated / values, "underflowed": underflowed / values}
            for name, (values, saturated, underflowed) in sorted(self.counts.items())
            if values
        }


def _relative(squares: list[float]) -> float | None:
    difference, reference = squares
    if reference == 0:
        return None if difference == 0 else math.inf
    return math.sqrt(difference / reference)


def _add(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


@dataclass(slots=True)
class LiveInput:
    """Input of a block in a training step."""

    args: tuple[Any, ...]
    """Positional arguments, the hidden states [B, T, hidden] first."""
    kwargs: dict[str, Any]
    gradient: Tensor | None = None
    """Gradient of the block's output, like the hidden states; None if no preceding layer trains."""


def block_error(block: nn.Module, live: LiveInput, round_linears: bool) -> BlockError:
    """Run a block in FP8 and in BF16 without changing the block, gradients or random states.

    ``round_linears``: on a CPU, compute BF16 by rounding. Weights must be gathered. The result is
    empty if BF16 is not finite either, so that FP8 is not the cause.
    """
    plain = _bare_copy(block)
    back_to_bf16(plain, round_linears)
    with watching() as counts:
        y8, grad8 = _run(_bare_copy(block), live)
    y, grad = _run(plain, live)
    if not all(x.isfinite().all() for x in (y, grad) if x is not None):
        return BlockError()
    error = BlockError(output=_squares(y8, y, live.args[0]))
    if grad8 is not None and grad is not None and live.gradient is not None:
        error.gradient = _squares(grad8, grad, live.gradient)
    error.counts = {name: sums.tolist() for name, sums in counts.sums.items()}
    return error


def _bare_copy(module: nn.Module) -> nn.Module:
    """Copy a module with detached shared weights, without hooks, in evaluation mode."""
    clone = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, Mapping):
            vars(clone)[name] = type(value)()
    parameters = {
        name: None if parameter is None else nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    vars(clone).pop(FORWARD, None)
    # ZeRO-3 replaces this dictionary with one that gathers weights on access.
    vars(clone).update(
        _parameters=parameters,
        _buffers=dict(module._buffers),
        _modules={
            name: None if child is None else _bare_copy(child)
            for name, child in module._modules.items()
        },
        training=False,
    )
    return clone


def _run(block: nn.Module, live: LiveInput) -> tuple[Tensor, Tensor | None]:
    """Return the output and the gradient of the hidden states."""
    needs_grad = live.gradient is not None
    with torch.set_grad_enabled(needs_grad):
        x = live.args[0].detach().requires_grad_(needs_grad)
        y = block(x, *live.args[1:], **live.kwargs)
        y = y[0] if isinstance(y, tuple) else y
        grad = torch.autograd.grad(y, x, live.gradient)[0] if needs_grad else None
    return y.detach(), grad


def _squares(fp8: Tensor, bf16: Tensor, through: Tensor) -> list[float]:
    difference, added = fp8.double() - bf16.double(), bf16.double() - through.double()
    return [difference.square().sum().item(), added.square().sum().item()]
