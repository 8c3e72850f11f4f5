"""The three GEMMs of a linear layer y = x W^T + b in FP8, shared by every FP8 block.

    GEMM          left operand                 right operand       result
    forward       x        E4M3  [M, K]        W    E4M3  [N, K]   y       [M, N], x's dtype
    grad-input    grad_y   E5M2  [M, N]        W^T  E4M3  [K, N]   grad_x  [M, K], x's dtype
    grad-weight   grad_y^T E5M2  [N, M']       x^T  E4M3  [K, M']  grad_W  [N, K], W's dtype

Hopper's FP8 tensor cores read both operands with the summed dimension contiguous, so each GEMM has
its own layout of each tensor. Each tensor has one scale (arXiv 2410.19313, section 4.1). M' is the
number of tokens M padded with zeros to a multiple of 16; K and N are multiples of 16. The bias
gradient is summed from grad_y in high precision. All three use fast accumulation, which makes a
step 5% shorter and leaves weight gradients of a trained model as close to FP32's
(docs/experiments/output_layer.md).

Layers that read the same input (q, k, v; gate, up) are one GEMM with a fused weight and one scale.
In some blocks the forward GEMM is not FP8 (``fp8.bf16_forward``).

Plain LoRA adapters of the layers, of rank r and scale s, are computed here from the FP8 tensors of
the GEMMs above (``coat_kernels/low_rank.py``); results have the model's dtype:

    forward       y += s P B^T                  P [M, r] = x A^T; saved
    grad-input    grad_P = s grad_y B           grad_x += grad_P A
    grad-weight   grad_B = s grad_y^T P         grad_A = grad_P^T x: in FP8 with x^T as above, or in
                                                the model's dtype with x (down of a frozen MLP)

Where the result is much wider than the operands (y of gate and up, grad_x of down), reading and
writing it for the sum takes longer than a GEMM of longer FP8 operands:

    forward       y = [x | P] [W | s B]^T
    grad-input    grad_x = [grad_y | grad_P] [W^T | A^T]^T

Layers with the same input share P's GEMM. Frozen weights have no grad-weight GEMM. Autograd passes
tensors and their gradients to and from a Function as one flat list, which :func:`unpack` divides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coat_kernels import (
    E4M3,
    QuantizedGradient,
    TensorScaled,
    append_low_rank,
    low_rank_gradient,
    low_rank_project,
    quantize_gradient,
    scaled_mm,
    transpose_quantized,
)
from coat_vlm.fp8 import saturation, weights
from coat_vlm.model.lora import base_layer, find_adapter

FLOPS_PER_BYTE = 300
"""FP8 operations that an H200 computes while it moves a byte: 1,300 TFLOP/s, 4.27 TB/s."""

LAUNCHES = 10**8
"""Bytes that an H200 moves in the time of the launches that append an adapter."""


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Settings of linear layers with the same input, computed by one GEMM."""

    key: weights.Key
    """Key of the fused weight in ``weights.py``."""
    bf16_forward: bool
    """Whether the forward GEMM runs in the model's dtype."""
    scales: tuple[float, ...]
    """Scale of each layer's adapter; 0 for a layer without one."""
    stored: TensorScaled | None = None
    """The fused weight if it is stored in FP8, [N, K]."""

    @property
    def num_tensors(self) -> int:
        """Length of :attr:`LayerValues.flat`."""
        return 4 * len(self.scales)


@dataclass(slots=True)
class LayerValues:
    """One value per layer of a fused linear layer: tensors, their gradients, or whether needed."""

    weights: list[Any]
    """[n_i, K]."""
    biases: list[Any]
    """[n_i] or None."""
    a: list[Any]
    """The matrix A [r_i, K] of the layer's LoRA adapter, or None."""
    b: list[Any]
    """B [n_i, r_i], or None."""

    @classmethod
    def empty(cls, fused: FusedLinear) -> "LayerValues":
        """Create it with None for every layer."""
        return unpack([None] * fused.num_tensors, fused)[0]

    @property
    def flat(self) -> list[Any]:
        """All values in one list, as autograd passes them."""
        return [*self.weights, *self.biases, *self.a, *self.b]


def unpack(flat: Sequence[Any], *fused: FusedLinear) -> list[LayerValues]:
    """Split flat values into groups, one for each fused layer; surplus values are ignored."""
    rest = iter(flat)
    return [
        LayerValues(*(list(islice(rest, len(each.scales))) for _ in range(4))) for each in fused
    ]


def save(ctx: Any, *groups: Sequence[Tensor | None]) -> None:
    """Save groups of tensors for backward."""
    ctx.save_for_backward(*chain(*groups))
    ctx.group_sizes = [len(group) for group in groups]


def load(ctx: Any) -> list[list[Any]]:
    """Return the groups of :func:`save`; once, as a checkpointed block refuses to unpack again."""
    rest = iter(ctx.saved_tensors)
    return [list(islice(rest, size)) for size in ctx.group_sizes]


@dataclass(slots=True)
class Saved:
    """Tensors that the backward GEMMs read."""

    scale: Tensor | None
    """Scale [] of the fused weight; None without an FP8 forward GEMM."""
    inner: Tensor | None
    """P [M, sum of r_i]; None without adapters."""
    layers: LayerValues

    @classmethod
    def of(cls, flat: Sequence[Any], fused: FusedLinear) -> "Saved":
        """Create from :attr:`flat`."""
        return cls(flat[0], flat[1], unpack(flat[2:], fused)[0])

    @property
    def flat(self) -> list[Tensor | None]:
        """All tensors in one list."""
        return [self.scale, self.inner, *self.layers.flat]


class Needs(NamedTuple):
    """Which gradients of a fused linear layer to compute."""

    input: bool
    weight: bool
    bias: bool
    adapters: bool

    @classmethod
    def of(cls, upstream: Sequence[bool], flags: LayerValues) -> "Needs":
        """Create from ``ctx.needs_input_grad`` of the preceding inputs and of the layers."""
        adapters = any(flags.a) or any(flags.b)
        return cls(any(upstream), any(flags.weights), any(flags.biases), adapters)

    @classmethod
    def find(cls, ctx: Any, fused: FusedLinear, upstream: int, start: int) -> "Needs":
        """Create for a Function with ``upstream`` differentiable inputs, and layers from start."""
        (flags,) = unpack(ctx.needs_input_grad[start:], fused)
        return cls.of(ctx.needs_input_grad[:upstream], flags)

    @property
    def rows(self) -> bool:
        """Whether the row-major quantized gradient is read."""
        return self.input or self.adapters

    @property
    def input_again(self) -> bool:
        """Whether the input of the forward GEMM is read again."""
        return self.weight or self.adapters


def collect(
    layers: Sequence[nn.Linear], pad_rows: int = 0, pad_columns: int = 0
) -> tuple[FusedLinear, LayerValues]:
    """Collect settings and parameters of layers that read the same input.

    Weights that are stored in FP8 are views of the stored ones, which have the padding. Others, the
    biases and matrices B get ``pad_rows`` zero rows, weights and matrices A ``pad_columns`` zero
    columns. Raises ValueError if a layer was wrapped after the conversion, in something else than
    plain LoRA.
    """
    adapters = [find_adapter(layer) for layer in layers]
    linears = [base_layer(layer) for layer in layers]
    for layer in linears:
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"a {type(layer).__module__}.{type(layer).__name__} wraps a linear layer of an FP8 "
                "block, which reads only the weight inside it, so the wrapper would have no "
                "effect: wrap the layers first (peft.get_peft_model), then convert the model"
            )
    plain = [layer for layer in linears if isinstance(layer, nn.Linear)]
    stored = weights.stored_weight(plain[0])
    fused = FusedLinear(
        weights.key_of(plain),
        vars(plain[0]).get("fp8_bf16_forward", False),
        tuple(0.0 if adapter is None else adapter.scale for adapter in adapters),
        stored,
    )
    values = LayerValues(
        [layer.weight for layer in plain],
        [layer.bias for layer in plain],
        [None if adapter is None else adapter.a for adapter in adapters],
        [None if adapter is None else adapter.b for adapter in adapters],
    )
    if pad_rows or pad_columns:
        if stored is None:
            values.weights = _pad(values.weights, (0, pad_columns, 0, pad_rows))
        values.biases = _pad(values.biases, (0, pad_rows))
        values.a = _pad(values.a, (0, pad_columns))
        values.b = _pad(values.b, (0, 0, 0, pad_rows))
    if stored is not None:
        values.weights = [*stored.q.split([layer.out_features + pad_rows for layer in plain])]
    return fused, values


def _pad(tensors: Sequence[Tensor | None], size: tuple[int, ...]) -> list[Tensor | None]:
    return [None if tensor is None else F.pad(tensor, size) for tensor in tensors]


def forward(
    x: TensorScaled,
    fused: FusedLinear,
    layers: LayerValues,
    dtype: torch.dtype,
    hp: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """Run the forward GEMM of x, E4M3 [M, K]; return [M, N], and what to save for backward.

    With ``hp``, x in high precision [M, K], the GEMM and the adapters run in the model's dtype.
    ``weight_scale`` is the scale that an earlier call saved, to run the same GEMM again.
    """
    parts, bias, scale = layers.weights, None, None
    if any(bias is not None for bias in layers.biases):
        given = [
            weight.new_zeros(weight.shape[0], dtype=dtype) if bias is None else bias.detach()
            for weight, bias in zip(parts, layers.biases, strict=True)
        ]
        bias = given[0] if len(given) == 1 else torch.cat(given)
    adapters, product = _adapters(fused, layers), None
    if adapters:
        matrices = [adapter.a.to(dtype).contiguous() for adapter in adapters]
        if hp is None:
            p = low_rank_project(x, matrices, transposed=True)
        else:
            p = F.linear(hp.to(dtype), torch.cat(matrices)).to(dtype)
        outer = [adapter.b.to(dtype).contiguous() for adapter in adapters]
        starts = [adapter.start for adapter in adapters]
        product = _Product(p, outer, starts, [adapter.scale for adapter in adapters])
    if hp is not None:
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        y = F.linear(hp.to(dtype), weight, None if bias is None else bias.to(dtype))
        y = _add(y.to(dtype), product)  # autocast may return another dtype
    else:
        quantized = fused.stored
        if quantized is None:
            quantized = weights.quantize_weight(fused.key, parts, weight_scale)
        scale = quantized.scale
        y = _multiply(x, quantized, dtype, bias, product)
    return y, Saved(scale, None if product is None else product.p, layers)


class _Product(NamedTuple):
    """P U^T, which adapters add to a result; as in ``append_low_rank``."""

    p: Tensor
    matrices: Sequence[Tensor]
    starts: Sequence[int]
    factors: Sequence[float]
    transposed: bool = False


def _multiply(
    a: TensorScaled,
    b: TensorScaled,
    dtype: torch.dtype,
    bias: Tensor | None,
    product: _Product | None,
) -> Tensor:
    """Multiply a [M, K] with b [N, K] and add the bias, and the adapters' product."""
    if product is not None and _is_wide(a, b, product.p):
        p, matrices, starts, factors, transposed = product
        a, b = append_low_rank(a, p, b, matrices, starts, factors, transposed=transposed)
        product = None
    return _add(scaled_mm(a, b, dtype, bias, fast=True), product)


def _add(y: Tensor, product: _Product | None) -> Tensor:
    """Add the adapters' product to y in place."""
    if product is None:
        return y
    p, matrices, starts, factors, transposed = product
    if transposed:  # all matrices A have all columns of y
        return y.addmm_(p, torch.cat([*matrices]))
    ranks = p.split([matrix.shape[1] for matrix in matrices], 1)
    for inner, matrix, start, factor in zip(ranks, matrices, starts, factors, strict=True):
        columns = y[:, start : start + len(matrix)]
        columns.addmm_(inner, matrix.t(), alpha=factor)
    return y


def _is_wide(a: TensorScaled, b: TensorScaled, inner: Tensor) -> bool:
    """Return whether to append an adapter to a [M, K] and b [N, K], not to add its output [M, N].

    A sum reads and writes the output. Appending copies both operands, and makes the GEMM longer.
    """
    (M, K), N, R = a.q.shape, len(b.q), inner.shape[1]
    added = 2 * inner.element_size() * M * N
    return added > 2 * K * (M + N) + 2 * M * N * R / FLOPS_PER_BYTE + LAUNCHES


class _Adapter(NamedTuple):
    """The adapter of one of the layers that share an input."""

    a: Tensor
    b: Tensor
    scale: float
    start: int
    """First column of the fused output that the layer computes."""


def _adapters(fused: FusedLinear, layers: LayerValues) -> list[_Adapter]:
    """List the layers' adapters; a layer without one is left out."""
    start, adapters = 0, list[_Adapter]()
    for weight, a, b, scale in zip(layers.weights, layers.a, layers.b, fused.scales, strict=True):
        if a is not None:
            adapters.append(_Adapter(a.detach(), b.detach(), scale, start))
        start += weight.shape[0]
    return adapters


def _adapters_backward(
    rows: TensorScaled, inner: Tensor, adapters: Sequence[_Adapter]
) -> tuple[Tensor, list[Tensor]]:
    """Compute gradients of P [M, R] and of the matrices B from the gradient of the output."""
    matrices = [adapter.b.to(inner.dtype).contiguous() for adapter in adapters]
    starts, scales = [x.start for x in adapters], [x.scale for x in adapters]
    sizes, ranks = zip(*(b.shape for b in matrices), strict=True)
    grads = low_rank_gradient(rows, inner, starts, sizes, ranks, scales)
    return low_rank_project(rows, matrices, starts, scales), grads


def quantize_grad(parts: Sequence[Tensor], needs: Needs) -> QuantizedGradient:
    """Quantize the gradient of the layers' output, as matrices [M, n_i], as the GEMMs need it."""
    quantized = quantize_gradient(parts, rows=needs.rows, transposed=needs.weight, bias=needs.bias)
    saturation.observe_gradient(quantized, lambda: torch.cat([*parts], 1))
    return quantized


def backward(
    grad_output: Tensor | Callable[[], QuantizedGradient],
    fused: FusedLinear,
    saved: Saved,
    needs: Needs,
    dtype: torch.dtype,
    input_again: Callable[[Tensor | None], TensorScaled],
    *,
    input_rows: bool = False,
) -> tuple[Tensor | None, LayerValues]:
    """Run the grad-input GEMM, then the grad-weight GEMM; return [M, K] or None, and the others.

    ``grad_output`` is the gradient of :func:`forward`'s result, [..., N] in high precision, or a
    function that returns it in FP8; each layout is freed after its GEMM. ``input_again`` returns
    x^T, E4M3 [K, M'], given the input's gradient; it is called at most once, for gradients of
    weights or adapters. If ``input_rows``, it returns x [M, K], for adapters of frozen weights.
    """
    layers, inner, parts = saved.layers, saved.inner, saved.layers.weights
    if isinstance(grad_output, Tensor):
        rows, transposed, grad_bias = quantize_grad([matrix(grad_output)], needs)
    else:
        rows, transposed, grad_bias = grad_output()
    grads, product = LayerValues.empty(fused), None
    if inner is not None and needs.rows:
        adapters = _adapters(fused, layers)
        grad_inner, grads_b = _adapters_backward(rows, inner, adapters)
        grads.b = _fill(layers.b, grads_b)
        matrices = [adapter.a.to(dtype).contiguous() for adapter in adapters]
        zeros, ones = [0] * len(adapters), [1.0] * len(adapters)
        product = _Product(grad_inner, matrices, zeros, ones, True)
    grad_input = None
    if needs.input:
        if fused.stored is None:
            weight = weights.quantize_weight_transposed(fused.key, parts, saved.scale)
        else:
            weight = transpose_quantized(fused.stored)
        grad_input = _multiply(rows, weight, dtype, None, product)
        del weight
    del rows
    x = input_again(grad_input) if needs.input_again else None
    if needs.weight and x is not None:
        grads.weights = [*_split(scaled_mm(transposed, x, parts[0].dtype, fast=True), parts)]
    if product is not None and x is not None:
        p, matrices, starts, factors, _ = product
        if input_rows:
            ranks, sizes = zip(*(a.shape for a in matrices), strict=True)
            grads_a = low_rank_gradient(x, p, starts, sizes, ranks, factors, transposed=True)
        else:
            # E4M3: the sums over the outputs have no such outliers as grad_y.
            inner8 = quantize_gradient([p], E4M3, rows=False).transposed
            grads_a = _split(scaled_mm(inner8, x, dtype), matrices)
        grads.a = _fill(layers.a, grads_a)
    if grad_bias is not None:
        grads.biases = [
            None if bias is None else piece.to(bias.dtype)
            for piece, bias in zip(_split(grad_bias, parts), layers.biases, strict=True)
        ]
    return grad_input, grads


def _fill(matrices: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients in the dtypes of the matrices, None for an absent matrix."""
    rest = iter(grads)
    return [None if matrix is None else next(rest).to(matrix.dtype) for matrix in matrices]


def matrix(x: Tensor) -> Tensor:
    """Reshape [..., K] to a contiguous matrix [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _split(grad: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the fused gradient into the layers' gradients."""
    return [grad] if len(parts) == 1 else grad.split([weight.shape[0] for weight in parts])
