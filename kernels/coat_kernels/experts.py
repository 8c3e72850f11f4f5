"""Grouped GEMM of experts in FP8, and the gradient of their gated activations.

A mixture of experts multiplies each token's row with the weights of a few of E experts. Rows are
sorted by expert; ``offsets`` [E], int32, are the ends of the experts' rows, and S is the number of
rows. torch's grouped GEMM (``torch._scaled_grouped_mm``, Hopper) has one scale per row of its left
operand and one per expert here. Both operands are E4M3, the gradients too: a row's own scale takes
the place of E5M2's range.

With h = activation(a) of a row, w its router weight and dh the gradient before w is applied:

    dw = sum of dh h,   da = w dh activation'(a),   scale = max(amax(da) / max, 2^-126) per row

One program computes whole rows from the group-scaled a. Reference: ``reference/experts.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.activation import ACTIVATIONS, is_gated
from coat_kernels.activation_tiles import gradients
from coat_kernels.device import SMALLEST_NORMAL, load_tile, magnitude_bits, row_offsets
from coat_kernels.formats import E4M3, GroupScaled, TensorScaled, check_matrix
from coat_kernels.launch import TOKENS, cdiv, launch
from coat_kernels.registry import register

ELEMENTS = 4096
"""Elements of a program's rows of dh, rounded up to a power of two each."""


@triton.jit(do_not_specialize=TOKENS)
def _expert_gradient_kernel(
    dh_ptr, a_ptr, e_ptr, weights_ptr,  # (M, F), (M, 2F) FP8, (M, 2F / GROUP), (M,)
    da_ptr, scale_ptr, dweights_ptr, h_ptr,  # (M, 2F), (M,), (M,), (M, F)
    M, F, KIND: tl.constexpr, QUANTIZED: tl.constexpr, INVERSE_MAX: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < M
    m_mn = m_m[:, None] & (o_n[None, :] < F)
    da, dup, h = gradients(
        dh_ptr, a_ptr, e_ptr, o_m, 0, m_mn, M, F, 2 * F, KIND, GROUP, BLOCK_M, BLOCK_N
    )
    dh = load_tile(dh_ptr, o_m, o_n, m_mn, F)
    tl.store(dweights_ptr + o_m, tl.sum(dh * h, axis=1), mask=m_m)
    weights = tl.load(weights_ptr + o_m, mask=m_m, other=0.0)[:, None]
    da *= weights
    dup *= weights
    if QUANTIZED:
        bits = tl.maximum(tl.max(magnitude_bits(da), axis=1), tl.max(magnitude_bits(dup), axis=1))
        scale = bits.to(tl.float32, bitcast=True) * INVERSE_MAX
        scale = tl.where(scale < SMALLEST_NORMAL, SMALLEST_NORMAL, scale)  # NaN stays
        tl.store(scale_ptr + o_m, scale, mask=m_m)
        inverse = tl.math.div_rn(1.0, scale)
        inverse = tl.where(inverse == inverse, inverse, 0.0)[:, None]
        da *= inverse
        dup *= inverse
    else:
        o_h = o_m[:, None] * F + o_n[None, :]
        tl.store(h_ptr + o_h, (h * weights).to(h_ptr.dtype.element_ty), mask=m_mn)
    o = o_m[:, None] * (2 * F) + o_n[None, :]
    tl.store(da_ptr + o, da.to(da_ptr.dtype.element_ty), mask=m_mn)
    tl.store(da_ptr + F + o, dup.to(da_ptr.dtype.element_ty), mask=m_mn)


def _empty(like: Tensor, quantized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, F = like.shape
    da = like.new_empty((M, 2 * F), dtype=E4M3.dtype if quantized else like.dtype)
    scale, dweights = (like.new_empty((n,), dtype=torch.float32) for n in (M * quantized, M))
    return da, scale, dweights, like.new_empty(0 if quantized else (M, F))


@register(fake=lambda dh, _a, _exponents, _weights, _kind, quantized: _empty(dh, quantized))
def _expert_gradient(
    dh: Tensor, a: Tensor, exponents: Tensor, weights: Tensor, kind: str, quantized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, F = dh.shape
    da, scale, dweights, h = _empty(dh, quantized)
    columns = 1 << (F - 1).bit_length()
    rows = max(1, ELEMENTS // columns)
    launch(
        _expert_gradient_kernel, (cdiv(M, rows),),
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, weights_ptr=weights, da_ptr=da, scale_ptr=scale,
        dweights_ptr=dweights, h_ptr=h, M=M, F=F, KIND=ACTIVATIONS.index(kind),
        QUANTIZED=quantized, INVERSE_MAX=1.0 / E4M3.max, GROUP=2 * F // exponents.shape[1],
        BLOCK_M=rows, BLOCK_N=columns,
    )  # fmt: skip
    return da, scale, dweights, h


def expert_gradient(
    grad_output: Tensor, a: GroupScaled, weights: Tensor, kind: str, *, quantized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of a gated activation's input a [S, 2F] and of router weights [S].

    ``grad_output`` [S, F] is the gradient of what the weights, FP32, multiply. Returns da [S, 2F],
    with ``quantized`` in E4M3 with scales [S], else in grad_output's dtype; the weights' gradient,
    FP32 [S]; without ``quantized`` also the activation times the weights [S, F], for grad-weight.
    """
    if not is_gated(kind):
        raise ValueError(f"expert_gradient: {kind!r} is not gated; use silu_mul or gelu_tanh_mul")
    check_matrix("expert_gradient", "grad_output", grad_output, (len(a.q), a.q.shape[1] // 2))
    return _expert_gradient(grad_output, *a, weights, kind, quantized)


quantize_rows = reference.quantize_rows


def scaled_grouped_mm(
    a: Tensor, a_scale: Tensor, b: TensorScaled, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply each row of a [S, K], E4M3 with scales [S], with its expert's b[e] [N, K].

    b has E4M3 data [E, N, K] and scales [E]; K and N are multiples of 16. Returns [S, N], on a GPU
    rounded to BF16.
    """
    if a.is_meta:
        return a.new_empty((len(a), b.q.shape[1]), dtype=dtype)
    if a.device.type == "cpu":
        return reference.scaled_grouped_mm(a, a_scale, *b, offsets, dtype)
    columns = b.scale[:, None].expand(-1, b.q.shape[1]).contiguous()
    y = torch.ops.aten._scaled_grouped_mm(
        a, b.q.transpose(1, 2), a_scale, columns, offs=offsets, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    return y.to(dtype)
