"""RMSNorm of each head of q or k, then RoPE, as in Qwen3 and Gemma 3, and its gradient.

Per head x of D channels, with the rotation R of ``rope.py``:

    y = R(xhat weight),   xhat = x rstd,   rstd = 1 / sqrt(avg(x^2) + eps)

    n = R^T(dy),   g = n weight,   dx = rstd (g - xhat avg(g xhat)),   dweight = sum of n xhat

Arithmetic is FP32 with one rounding, where transformers rounds after the norm and after each
product of the rotation. Every element is read and written once; backward computes rstd again.
Partial sums for the weight are added in a fixed order, so they are deterministic. Reference:
``reference/head_norm.py``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import load_halves, row_offsets, store_halves
from coat_kernels.formats import check_dtype, check_matrix, check_vector
from coat_kernels.launch import TOKENS, cdiv, launch
from coat_kernels.registry import register
from coat_kernels.rope import check_embedding

BLOCK_ROWS = 16
"""Tokens per program."""

BLOCK_HEADS = 8
"""Heads per program; cos, sin and the weight stay in registers for all of them."""


@triton.jit
def _load_weight(weight_ptr, D, HALF: tl.constexpr):
    """Load both halves [1, HALF] of a head's weight, FP32."""
    o_h = tl.arange(0, HALF)[None, :]
    w1 = tl.load(weight_ptr + o_h, mask=o_h < D // 2, other=0.0).to(tl.float32)
    w2 = tl.load(weight_ptr + D // 2 + o_h, mask=o_h < D // 2, other=0.0).to(tl.float32)
    return w1, w2


@triton.jit
def _normalize(x1, x2, D, eps):
    """Normalize a head's halves [BLOCK_M, HALF]; also returns rstd [BLOCK_M, 1]."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    rstd = tl.math.rsqrt(squares / D + eps)[:, None]
    return x1 * rstd, x2 * rstd, rstd


@triton.jit(do_not_specialize=TOKENS)
def _head_norm_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr,  # (M, H D), (D,), (R, D), (R, D), (M, H D)
    M, R, H, D, stride, eps,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    m_m = o_m < M
    c1, c2 = load_halves(cos_ptr, o_m % R, D, m_m, D, HALF)
    s1, s2 = load_halves(sin_ptr, o_m % R, D, m_m, D, HALF)
    w1, w2 = _load_weight(weight_ptr, D, HALF)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        mask = m_m & (head < H)
        x1, x2 = load_halves(x_ptr + head * D, o_m, stride, mask, D, HALF)
        n1, n2, _ = _normalize(x1, x2, D, eps)
        n1 *= w1
        n2 *= w2
        y1, y2 = n1 * c1 - n2 * s1, n2 * c2 + n1 * s2
        store_halves(y_ptr + head * D, o_m, H * D, mask, D, y1, y2, HALF)


@triton.jit(do_not_specialize=TOKENS)
def _head_norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr,  # (M, H D), (M, H D), (D,), (R, D), (R, D)
    dx_ptr, sums_ptr,  # (M, H D), (programs, D) FP32 partial sums
    M, R, H, D, stride, eps,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    m_m = o_m < M
    c1, c2 = load_halves(cos_ptr, o_m % R, D, m_m, D, HALF)
    s1, s2 = load_halves(sin_ptr, o_m % R, D, m_m, D, HALF)
    w1, w2 = _load_weight(weight_ptr, D, HALF)
    dw1 = tl.zeros((HALF,), dtype=tl.float32)
    dw2 = tl.zeros((HALF,), dtype=tl.float32)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        mask = m_m & (head < H)
        y1, y2 = load_halves(dy_ptr + head * D, o_m, H * D, mask, D, HALF)
        g1, g2 = y1 * c1 + y2 * s2, y2 * c2 - y1 * s1
        x1, x2 = load_halves(x_ptr + head * D, o_m, stride, mask, D, HALF)
        n1, n2, rstd = _normalize(x1, x2, D, eps)
        # With eps = 0 the zeros beyond the last row and head are normalized to NaN.
        dw1 += tl.sum(tl.where(mask[:, None], g1 * n1, 0.0), axis=0)
        dw2 += tl.sum(tl.where(mask[:, None], g2 * n2, 0.0), axis=0)
        g1 *= w1
        g2 *= w2
        average = ((tl.sum(g1 * n1, axis=1) + tl.sum(g2 * n2, axis=1)) / D)[:, None]
        d1, d2 = (g1 - n1 * average) * rstd, (g2 - n2 * average) * rstd
        store_halves(dx_ptr + head * D, o_m, H * D, mask, D, d1, d2, HALF)
    o_h = tl.arange(0, HALF)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + program * D + o_h, dw1, mask=o_h < D // 2)
    tl.store(sums_ptr + program * D + D // 2 + o_h, dw2, mask=o_h < D // 2)


def _arguments(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> dict[str, Any]:
    """Return what both kernels have in common."""
    (M, N), (R, D) = x.shape, cos.shape
    return {
        "x_ptr": x, "weight_ptr": weight, "cos_ptr": cos, "sin_ptr": sin, "M": M, "R": R,
        "H": N // D, "D": D, "stride": x.stride(0), "eps": float(eps),
        "HALF": triton.next_power_of_2(D // 2), "BLOCK_M": BLOCK_ROWS, "BLOCK_H": BLOCK_HEADS,
    }  # fmt: skip


def _grid(x: Tensor, cos: Tensor) -> tuple[int, int]:
    return cdiv(x.shape[0], BLOCK_ROWS), cdiv(x.shape[1] // cos.shape[1], BLOCK_HEADS)


@register(fake=lambda x, *_: x.new_empty(x.shape))
def _head_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    launch(
        _head_norm_kernel, _grid(x, cos), num_warps=4, y_ptr=y,
        **_arguments(x, weight, cos, sin, eps),
    )  # fmt: skip
    return y


@register(
    fake=lambda dy, _x, weight, *_: (
        torch.empty_like(dy),
        weight.new_empty(weight.shape, dtype=torch.float32),
    ),
)
def _head_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dx, grid = torch.empty_like(dy), _grid(x, cos)
    sums = dy.new_empty((grid[0] * grid[1], cos.shape[1]), dtype=torch.float32)
    launch(
        _head_norm_bwd_kernel, grid, num_warps=4, dy_ptr=dy, dx_ptr=dx, sums_ptr=sums,
        **_arguments(x, weight, cos, sin, eps),
    )  # fmt: skip
    return dx, sums.sum(0)


def head_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm of each head with weight [D], then rotate.

    x is q or k of M tokens [M, heads D], FP32, BF16 or FP16. Rows are contiguous; they may be part
    of longer ones. cos and sin [R, D] as in :func:`coat_kernels.rope`.
    """
    _check("head_norm", x, weight, cos, sin)
    return _head_norm(x, weight, cos, sin, eps)


def head_norm_bwd(
    grad_output: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x, in grad_output's dtype, and of the weight, FP32 [D].

    ``grad_output`` [M, heads D] is contiguous; the other arguments are :func:`head_norm`'s.
    """
    _check("head_norm_bwd", x, weight, cos, sin)
    check_matrix("head_norm_bwd", "grad_output", grad_output, (x.shape[0], x.shape[1]))
    return _head_norm_bwd(grad_output, x, weight, cos, sin, eps)


def _check(op: str, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_embedding(op, x.shape[0], cos, sin)
    D = cos.shape[1]
    check_vector(op, "weight", weight, D)
    if x.dim() != 2 or x.stride(1) != 1 or not x.shape[1] or x.shape[1] % D:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)} and strides {x.stride()}; it must be a matrix "
            f"[M, heads * {D}] whose rows are contiguous"
        )
    check_dtype(op, "x", x)
