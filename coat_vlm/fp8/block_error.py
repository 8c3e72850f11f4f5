"""How far an FP8 block is from the same block in BF16, on one input; and back to BF16 for good.

A block returns x + f(x), and mostly x. Its error is measured on what it adds, likewise that of the
gradient g it gets, of which it returns g + (df/dx)^T g:

    output error         = |y_fp8 - y_bf16| / |y_bf16 - x|
    input gradient error = |dx_fp8 - dx_bf16| / |dx_bf16 - g|

Both run on copies without hooks, in evaluation mode: no dropout, no weight gradient, no collective.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coat_vlm.fp8.arithmetic import Bf16RoundedLinear
from coat_vlm.fp8.convert import original_class
from coat_vlm.fp8.decoder_block import Fp8DecoderLayer
from coat_vlm.fp8.encoder_block import Fp8EncoderLayer
from coat_vlm.fp8.graphs import FORWARD
from coat_vlm.fp8.linear import Fp8Linear
from coat_vlm.fp8.monitor import watching


@dataclass(slots=True)
class BlockError:
    """Sums over one or more inputs, from which the errors follow."""

    output: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Squares of the difference, and of what the block adds in BF16."""
    gradient: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The same of the input's gradient; zeros where there was none."""
    counts: dict[str, list[float]] = field(default_factory=dict)
    """Kind of tensor -> values, saturated, underflowed (:mod:`coat_vlm.fp8.monitor`)."""

    def add(self, other: "BlockError") -> None:
        """Add the sums of other inputs."""
        self.output = _added(self.output, other.output)
        self.gradient = _added(self.gradient, other.gradient)
        for kind, row in other.counts.items():
            self.counts[kind] = _added(self.counts.get(kind, [0.0] * 3), row)

    @property
    def output_error(self) -> float | None:
        """Relative error of the output; None where nothing was compared, NaN where FP8 gave it."""
        return _relative(self.output)

    @property
    def input_gradient_error(self) -> float | None:
        """Relative error of the input's gradient; None where no gradient reached the block."""
        return _relative(self.gradient)

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """Per kind of tensor the shares that saturated and that underflowed."""
        return {
            kind: {"saturated": saturated / values, "underflowed": underflowed / values}
            for kind, (values, saturated, underflowed) in sorted(self.counts.items())
            if values
        }


@dataclass(slots=True)
class LiveInput:
    """What a block got in a training step."""

    args: tuple[Any, ...]
    """Positional arguments, the hidden states [B, T, hidden] first."""
    kwargs: dict[str, Any]
    gradient: Tensor | None = None
    """Of the block's output, like the hidden states; None where nothing before it trains."""


def block_error(block: nn.Module, live: LiveInput, round_linears: bool) -> BlockError:
    """Run a block in FP8 and in BF16; the block, its gradients and random states stay untouched.

    Args:
        block: a block that :func:`coat_vlm.fp8.convert.convert` converted, its weights whole.
        live: its input.
        round_linears: on a CPU, compute BF16 by rounding (:mod:`coat_vlm.fp8.arithmetic`).

    Returns:
        Sums; none where BF16 is not finite either, so that FP8 is not to blame.
    """
    plain = _bare_copy(block)
    back_to_bf16(plain, round_linears)
    with watching() as counts:
        y8, dx8 = _run(_bare_copy(block), live)
    y, dx = _run(plain, live)
    if not all(x.isfinite().all() for x in (y, dx) if x is not None):
        return BlockError()
    error = BlockError(output=_squares(y8, y, live.args[0]))
    if dx8 is not None and dx is not None and live.gradient is not None:
        error.gradient = _squares(dx8, dx, live.gradient)
    error.counts = {kind: row.tolist() for kind, row in counts.sums.items()}
    return error


def back_to_bf16(block: nn.Module, round_linears: bool) -> None:
    """Undo a block's conversion in place, as if ``fp8.skip_first`` had left it.

    Args:
        block: as :func:`block_error`'s.
        round_linears: likewise.
    """
    modules: list[Any] = list(block.modules())
    if isinstance(block, Fp8DecoderLayer | Fp8EncoderLayer):
        modules[0].__class__ = original_class(block)
    for layer in modules:
        kind: type = type(layer)
        if kind in (nn.Linear, Fp8Linear):
            layer.__class__ = Bf16RoundedLinear if round_linears else nn.Linear


def _bare_copy(module: nn.Module) -> nn.Module:
    """The module with the same weights, detached, and without hooks, in evaluation mode."""
    clone = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, Mapping):
            vars(clone)[name] = type(value)()
    parameters = {
        name: None if parameter is None else nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    vars(clone).pop(FORWARD, None)
    # ZeRO-3 has a dictionary of its own here, which gathers a weight that is asked for.
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
    """Output, and gradient of the hidden states."""
    wanted = live.gradient is not None
    with torch.set_grad_enabled(wanted):
        x = live.args[0].detach().requires_grad_(wanted)
        y = block(x, *live.args[1:], **live.kwargs)
        y = y[0] if isinstance(y, tuple) else y
        dx = torch.autograd.grad(y, x, live.gradient)[0] if wanted else None
    return y.detach(), dx


def _squares(fp8: Tensor, bf16: Tensor, through: Tensor) -> list[float]:
    difference, added = fp8.double() - bf16.double(), bf16.double() - through.double()
    return [difference.square().sum().item(), added.square().sum().item()]


def _relative(squares: list[float]) -> float | None:
    difference, reference = squares
    if reference == 0:
        return None if difference == 0 else math.inf
    return math.sqrt(difference / reference)


def _added(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]
