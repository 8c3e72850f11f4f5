"""The three GEMMs of a linear layer in FP8, shared by every FP8 block.

    forward      y [M, N]           = x [M, K]            @ W [N, K]^T  + b
    grad-input   grad_x [M, K]      = grad_y [M, N]       @ W^T [K, N]^T
    grad-weight  grad_W [N, K]      = grad_y^T [N, M']    @ x^T [K, M']^T

x and W are E4M3, grad_y is E5M2 or E4M3 (``fp8.gradients`` of a recipe). Operands are contiguous
along the summed dimension. Each has one scale per tensor (arXiv 2410.19313, section 4.1),
and M' is the number of tokens M padded with zeros to a multiple of 16. All three use fast
accumulation. (torchao and TransformerEngine use it in the forward GEMM alone by default. Here it
left the weight gradients of a trained model as close to FP32's as without it, and takes 5% of a
step less: docs/experiments/output_layer.md.)

Layers that read the same input (q, k, v; gate, up) are one GEMM with a fused weight and one scale.
``weights.py`` provides FP8 weights and caches them. In the first blocks the forward GEMM is not FP8
(``fp8.bf16_forward_first``).

Plain LoRA adapters of the layers are computed here, in the model's dtype, from the FP8 tensors of
the GEMMs above (``coat_kernels/low_rank.py``); with s the scale:

    forward       y += s P B^T                  P [M, r] = x A^T; saved
    grad-input    grad_P = s grad_y B           grad_x += grad_P A
    grad-weight   grad_B = s grad_y^T P         grad_A = grad_P^T x in FP8, with x^T as above

Layers with the same input share P's GEMM. Frozen weights have no grad-weight GEMM; they may be
stored in FP8 alone (``weights.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    E4M3,
    E5M2,
    Format,
    QuantizedGradient,
    TensorScaled,
    low_rank_gradient,
    low_rank_project,
    quantize_gradient,
    scaled_mm,
    transpose_quantized,
)
from coat_kernels.formats import FORMATS
from coat_vlm.fp8 import saturation, weights
from coat_vlm.model.lora import base_layer, find_adapter


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Settings of linear layers with the same input, computed by one GEMM."""

    key: weights.Key
    """Key of the fused weight in ``weights.py``."""
    grad_format: Format
    """FP8 format of the output's gradient."""
    bf16_forward: bool
    """Whether the forward GEMM runs in the model's dtype."""
    num_layers: int
    scales: tuple[float, ...] = ()
    """Scale of each layer's adapter, 0 for a layer without one; empty if no layer has one."""
    stored: TensorScaled | None = None
    """The fused weight if it is stored in FP8, [N, K]."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors that are called ``stacked`` below."""
        return (4 if self.scales else 2) * self.num_layers


class Needs(NamedTuple):
    """Which gradients of a fused linear layer to compute."""

    input: bool
    weight: bool
    bias: bool
    adapters: bool

    @classmethod
    def of(cls, upstream: Sequence[bool], stacked: Sequence[bool], fused: FusedLinear) -> "Needs":
        """Create from ``ctx.needs_input_grad`` of the preceding inputs and of ``stacked``."""
        n = fused.num_layers
        return cls(any(upstream), any(stacked[:n]), any(stacked[n : 2 * n]), any(stacked[2 * n :]))

    @property
    def rows(self) -> bool:
        """Whether the row-major quantized gradient is read."""
        return self.input or self.adapters

    @property
    def input_transposed(self) -> bool:
        """Whether the input of the forward GEMM is read again, transposed."""
        return self.weight or self.adapters


def arguments(
    layers: Sequence[nn.Linear], pad_rows: int = 0, pad_columns: int = 0
) -> tuple[Any, ...]:
    """Return an autograd Function's arguments for layers that read the same input.

    The first layer's attributes ``fp8_gradients``, the name of a format, and ``fp8_bf16_forward``
    apply to all layers.

    Args:
        layers: the linear layers.
        pad_rows: zero rows appended to each weight, bias and matrix B.
        pad_columns: zero columns appended to each weight and matrix A.

    Returns:
        A :class:`FusedLinear`; the weights [n_i, K]; the biases [n_i] or None; if a layer has a
        LoRA adapter, the matrices A [r_i, K] and the matrices B [n_i, r_i], or None. The tensors
        are called ``stacked`` below.

    Raises:
        ValueError: a layer was wrapped after the conversion, in something else than plain LoRA.
    """
    found = [find_adapter(layer) for layer in layers]
    linears = [base_layer(layer) for layer in layers]
    for layer in linears:
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"a {type(layer).__module__}.{type(layer).__name__} wraps a linear layer of an FP8 "
                "block, which reads only the weight inside it, so the wrapper would have no "
                "effect: wrap the layers first (peft.get_peft_model), then convert the model"
            )
    plain = [layer for layer in linears if isinstance(layer, nn.Linear)]
    settings = vars(plain[0])
    fused = FusedLinear(
        weights.key_of(plain),
        FORMATS[settings.get("fp8_gradients", E5M2.name)],
        settings.get("fp8_bf16_forward", False),
        len(plain),
        tuple(0.0 if adapter is None else adapter.scale for adapter in found) if any(found) else (),
        weights.stored_weight(plain),
    )
    matrices, biases = [layer.weight for layer in plain], [layer.bias for layer in plain]
    a = [None if adapter is None else adapter.a for adapter in found]
    b = [None if adapter is None else adapter.b for adapter in found]
    if pad_rows or pad_columns:
        matrices = [F.pad(weight, (0, pad_columns, 0, pad_rows)) for weight in matrices]
        biases = [None if bias is None else F.pad(bias, (0, pad_rows)) for bias in biases]
        a = [None if matrix is None else F.pad(matrix, (0, pad_columns)) for matrix in a]
        b = [None if matrix is None else F.pad(matrix, (0, 0, 0, pad_rows)) for matrix in b]
    return (fused, *matrices, *biases, *((*a, *b) if fused.scales else ()))


def forward(
    x: TensorScaled,
    fused: FusedLinear,
    stacked: Sequence[Tensor | None],
    dtype: torch.dtype,
    hp: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Run the forward GEMM.

    Args:
        x: E4M3 [M, K].
        fused: the layers.
        stacked: their tensors, from :func:`arguments`.
        dtype: dtype of the result.
        hp: x in high precision, [M, K], to run the GEMM in the model's dtype.
        weight_scale: the first tensor that an earlier call returned to save, to run the same GEMM
            again.

    Returns:
        [M, N], the layers' outputs concatenated; tensors to save for backward: the scale [] of the
        fused weight (None without FP8), P [M, sum of r_i] (None without adapters), and ``stacked``.
    """
    parts = _weights(stacked, fused)
    biases = stacked[len(parts) : 2 * len(parts)]
    bias = None
    if any(bias is not None for bias in biases):
        given = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
            for weight, bias in zip(parts, biases, strict=True)
        ]
        bias = given[0] if len(given) == 1 else torch.cat(given)
    if hp is not None:
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        y = F.linear(hp.to(dtype), weight, None if bias is None else bias.to(dtype))
        y, scale = y.to(dtype), None  # autocast may return another dtype
    else:
        quantized = fused.stored
        if quantized is None:
            quantized = weights.quantize_weight(fused.key, parts, weight_scale)
        y, scale = scaled_mm(x, quantized, dtype, bias, fast=True), quantized.scale
    inner = _add_adapters(y, x, fused, stacked) if fused.scales else None
    return y, (scale, inner, *stacked)


class _Adapter(NamedTuple):
    """The adapter of one of the layers that share an input."""

    a: Tensor
    """[r, K]."""
    b: Tensor
    """[n, r]."""
    scale: float
    columns: slice
    """Columns of the fused output that the layer computes."""
    ranks: slice
    """Columns of P."""


def _adapters(fused: FusedLinear, stacked: Sequence[Tensor | None]) -> list[_Adapter]:
    """Find the adapters among the layers' tensors; a layer without one is left out."""
    n, start, rank = fused.num_layers, 0, 0
    found: list[_Adapter] = []
    for weight, a, b, scale in zip(
        stacked[:n], stacked[2 * n : 3 * n], stacked[3 * n :], fused.scales, strict=True
    ):
        assert weight is not None
        end = start + weight.shape[0]
        if a is not None and b is not None:
            ranks = slice(rank, rank + a.shape[0])
            found.append(_Adapter(a.detach(), b.detach(), scale, slice(start, end), ranks))
            rank = ranks.stop
        start = end
    return found


def _add_adapters(
    y: Tensor, x: TensorScaled, fused: FusedLinear, stacked: Sequence[Tensor | None]
) -> Tensor:
    """Add the adapters' outputs to y [M, N] in place; return P [M, R]."""
    adapters = _adapters(fused, stacked)
    matrices = [adapter.a.to(y.dtype).contiguous() for adapter in adapters]
    inner = low_rank_project(x, matrices, transposed=True)
    for _, b, scale, columns, ranks in adapters:
        y[:, columns].addmm_(inner[:, ranks], b.to(y.dtype).t(), alpha=scale)
    return inner


def _adapters_backward(
    rows: TensorScaled, inner: Tensor, fused: FusedLinear, stacked: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """Compute gradients of P [M, R] and of the matrices B from that of the layers' output."""
    adapters = _adapters(fused, stacked)
    matrices = [adapter.b.to(inner.dtype).contiguous() for adapter in adapters]
    starts, scales = [x.columns.start for x in adapters], [x.scale for x in adapters]
    sizes, ranks = zip(*(b.shape for b in matrices), strict=True)
    grads = low_rank_gradient(rows, inner, starts, sizes, ranks, scales)
    return low_rank_project(rows, matrices, starts, scales), grads


def quantize_grad(parts: Sequence[Tensor], fused: FusedLinear, needs: Needs) -> QuantizedGradient:
    """Quantize the gradient of the layers' output in the layouts that the GEMMs need.

    Args:
        parts: the gradient, as matrices [M, n_i] to be concatenated by columns.
        fused: the layers.
        needs: the gradients to compute.
    """
    quantized = quantize_gradient(
        parts, fused.grad_format, rows=needs.rows, transposed=needs.weight, bias=needs.bias
    )
    saturation.observe_gradient(quantized, lambda: torch.cat([*parts], 1))
    return quantized


def backward(
    grad_output: Tensor | Callable[[], QuantizedGradient],
    fused: FusedLinear,
    saved: Sequence[Tensor | None],
    needs: Needs,
    dtype: torch.dtype,
    input_transposed: Callable[[Tensor | None], TensorScaled],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Run the grad-input GEMM, then the grad-weight GEMM.

    Args:
        grad_output: gradient of :func:`forward`'s result, [..., N] in high precision; or a function
            that returns it in FP8. Each layout is freed after its GEMM.
        fused: the layers.
        saved: from :func:`forward`.
        needs: the gradients to compute.
        dtype: dtype of the input's gradient.
        input_transposed: returns x^T, E4M3 [K, M'], given the input's gradient; called only for
            gradients of weights or adapters, once.

    Returns:
        The input's gradient [M, K] or None; gradients of ``stacked`` in their dtypes, or None.
    """
    weight_scale, inner, *stacked = saved
    parts = _weights(stacked, fused)
    if isinstance(grad_output, Tensor):
        rows, transposed, grad_bias = quantize_grad([matrix(grad_output)], fused, needs)
    else:
        rows, transposed, grad_bias = grad_output()
    grads: list[Tensor | None] = [None] * len(stacked)
    n, grad_inner = len(parts), None
    if inner is not None and needs.rows:
        grad_inner, grads_b = _adapters_backward(rows, inner, fused, stacked)
        _place(grads, 3 * n, stacked, grads_b)
    grad_input = None
    if needs.input:
        if fused.stored is None:
            weight = weights.quantize_weight_transposed(fused.key, parts, weight_scale)
        else:
            weight = transpose_quantized(fused.stored)
        grad_input = scaled_mm(rows, weight, dtype, fast=True)
        del weight
        if grad_inner is not None:
            a = [adapter.a.to(dtype) for adapter in _adapters(fused, stacked)]
            grad_input.addmm_(grad_inner, a[0] if len(a) == 1 else torch.cat(a))
    del rows
    x = input_transposed(grad_input) if needs.input_transposed else None
    if needs.weight and x is not None:
        grads[:n] = _split(scaled_mm(transposed, x, parts[0].dtype, fast=True), parts)
    if grad_inner is not None and x is not None:
        # E4M3: the sums over the outputs have no such outliers as grad_y.
        inner8 = quantize_gradient([grad_inner], E4M3, rows=False).transposed
        matrices = [a for a in stacked[2 * n : 3 * n] if a is not None]
        _place(grads, 2 * n, stacked, _split(scaled_mm(inner8, x, dtype), matrices))
    if grad_bias is not None:
        grads[n : 2 * n] = [
            None if bias is None else piece.to(bias.dtype)
            for piece, bias in zip(_split(grad_bias, parts), stacked[n : 2 * n], strict=True)
        ]
    return grad_input, grads


def _place(
    grads: list[Tensor | None],
    start: int,
    stacked: Sequence[Tensor | None],
    found: Sequence[Tensor],
) -> None:
    """Write the gradients of the adapters' A or B, whose places begin at ``start``."""
    given = [(i, like) for i, like in enumerate(stacked) if i >= start and like is not None]
    for (i, like), grad in zip(given, found, strict=False):  # after all of A comes B
        grads[i] = grad.to(like.dtype)


def matrix(x: Tensor) -> Tensor:
    """Reshape [..., K] to a contiguous matrix [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _weights(stacked: Sequence[Tensor | None], fused: FusedLinear) -> list[Tensor]:
    return [weight for weight in stacked[: fused.num_layers] if weight is not None]


def _split(grad: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the fused gradient into the layers' gradients."""
    return [grad] if len(parts) == 1 else grad.split([weight.shape[0] for weight in parts])
