"""The gradient of a joint q, k, v projection from those of the heads: rotated back and quantized.

    dx1 = dy1 c1 + dy2 s2,   dx2 = dy2 c2 - dy1 s1       (q and k; v as it is)
    scale = max(amax(dx) / max, 2^-126),   codes = cast(dx / scale),   db = sum over tokens of dx

dx never is in memory: dq, dk and dv are read twice, for the amax and for the codes of both layouts.
Per element of 16 bits 6 bytes are moved, where rotation and quantization apart move 10.
Reference: ``reference.rope_gradient``.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import (
    E5M2,
    Format,
    GradientCodes,
    format_of,
    padded,
)
from coat_kernels.gradient import as_codes, empty_gradient, gradient_room
from coat_kernels.launch import TOKENS, cdiv, launch, one_or_two_passes
from coat_kernels.registry import register
from coat_kernels.rope import check_heads_gradient, load_half, of_head
from coat_kernels.scales import new_scale
from coat_kernels.tile import (
    inverse_scale,
    magnitude_bits,
    publish_scale,
    row_offsets,
    store_codes,
    word_offsets,
)

BLOCK_ROWS = 32
"""Tokens per program: with 64 the tiles of both layouts take so many registers that one program
fills a multiprocessor."""

BLOCK_HEADS = 8
"""Heads per program, for which cos and sin stay in registers."""

WARPS = 2
"""Of a program that writes codes."""

STATS_WARPS = 8
"""Of one that looks for the largest magnitude."""


@triton.jit
def _rotated_back(
    dq_ptr, dk_ptr, dv_ptr, c1, c2, s1, s2, head, o_m, m_m, H, KV, D, HALF: tl.constexpr
):
    """FP32 halves [BLOCK_M, HALF] of a head's gradient; zero outside the mask."""
    part = of_head(dq_ptr, dk_ptr, dv_ptr, head, H, KV, D)
    stride = (H if head < H else KV) * D
    mask = m_m & (head < H + 2 * KV)
    y1 = load_half(part, o_m, stride, 0, mask, D, HALF)
    y2 = load_half(part, o_m, stride, D // 2, mask, D, HALF)
    x1, x2 = y1, y2
    if head < H + KV:
        x1 = y1 * c1 + y2 * s2
        x2 = y2 * c2 - y1 * s1
    return x1, x2


@triton.jit(do_not_specialize=TOKENS)
def _rope_gradient_stats_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,  # (M, H D), (M, KV D), (M, KV D), (R, D), (R, D)
    scale_ptr,  # ()
    M, R, H, KV, D,
    INVERSE_MAX: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    m_m = o_m < M
    c1 = load_half(cos_ptr, o_m % R, D, 0, m_m, D, HALF)
    c2 = load_half(cos_ptr, o_m % R, D, D // 2, m_m, D, HALF)
    s1 = load_half(sin_ptr, o_m % R, D, 0, m_m, D, HALF)
    s2 = load_half(sin_ptr, o_m % R, D, D // 2, m_m, D, HALF)
    bits = tl.zeros((BLOCK_M, HALF), dtype=tl.int32)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        x1, x2 = _rotated_back(
            dq_ptr, dk_ptr, dv_ptr, c1, c2, s1, s2, head, o_m, m_m, H, KV, D, HALF
        )
        bits = tl.maximum(bits, tl.maximum(magnitude_bits(x1), magnitude_bits(x2)))
    amax_bits = tl.max(tl.max(bits, axis=1), axis=0)
    publish_scale(amax_bits, scale_ptr, INVERSE_MAX)


@triton.jit(do_not_specialize=TOKENS)
def _rope_gradient_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, scale_ptr,  # as above, ()
    q_ptr, qt_ptr, sums_ptr,  # (M, N) and (N, M_PADDED) FP8, (rows of tiles, N) FP32 partial sums
    M, M_PADDED, R, H, KV, D, N,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    o_m = word_offsets(i_m, BLOCK_M)
    m_m = o_m < M
    c1 = load_half(cos_ptr, o_m % R, D, 0, m_m, D, HALF)
    c2 = load_half(cos_ptr, o_m % R, D, D // 2, m_m, D, HALF)
    s1 = load_half(sin_ptr, o_m % R, D, 0, m_m, D, HALF)
    s2 = load_half(sin_ptr, o_m % R, D, D // 2, m_m, D, HALF)
    inverse = inverse_scale(scale_ptr)
    o_h = tl.arange(0, HALF)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        x1, x2 = _rotated_back(
            dq_ptr, dk_ptr, dv_ptr, c1, c2, s1, s2, head, o_m, m_m, H, KV, D, HALF
        )
        m_n = (o_h < D // 2) & (head < H + 2 * KV)
        o_n = head * D + o_h
        store_codes(
            x1 * inverse, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, M_PADDED, N, M_PADDED, ROWS,
            TRANSPOSED, BLOCK_M, HALF,
        )  # fmt: skip
        store_codes(
            x2 * inverse, q_ptr, qt_ptr, o_m, i_m, o_n + D // 2, m_n, M, M_PADDED, N, M_PADDED,
            ROWS, TRANSPOSED, BLOCK_M, HALF,
        )  # fmt: skip
        if BIAS:
            o = i_m.to(tl.int64) * N + o_n
            tl.store(sums_ptr + o, tl.sum(x1, axis=0), mask=m_n)
            tl.store(sums_ptr + o + D // 2, tl.sum(x2, axis=0), mask=m_n)


def _empty_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, _cos: Tensor, _sin: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    return empty_gradient(dq.shape[0], columns, dq, *rest)


def _rope_gradient_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, rows: bool,
    transposed: bool, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    M, (R, D) = dq.shape[0], cos.shape
    H, KV = dq.shape[1] // D, dk.shape[1] // D
    q, qt, sums = gradient_room(M, (H + 2 * KV) * D, dq, fmt, rows, transposed, bias)
    half = triton.next_power_of_2(D // 2)
    heads, tiles = cdiv(H + 2 * KV, BLOCK_HEADS), cdiv(M, BLOCK_ROWS)
    shapes = {"M": M, "R": R, "H": H, "KV": KV, "D": D}
    blocks = {"HALF": half, "BLOCK_M": BLOCK_ROWS, "BLOCK_H": BLOCK_HEADS}
    inputs = {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "cos_ptr": cos, "sin_ptr": sin}
    scale = new_scale(dq.device)
    launch(
        _rope_gradient_stats_kernel, (tiles, heads), scale_ptr=scale,
        INVERSE_MAX=1.0 / format_of(fmt).max, num_warps=STATS_WARPS, **inputs, **shapes, **blocks,
    )  # fmt: skip
    if not (rows or transposed or bias):
        return q, qt, scale, sums
    tiles = cdiv(padded(M) if transposed else M, BLOCK_ROWS)
    partial = sums.new_empty((tiles, sums.shape[0])) if bias else sums
    for in_rows, in_columns in one_or_two_passes(rows, transposed, D):
        launch(
            _rope_gradient_kernel, (tiles, heads),
            scale_ptr=scale, q_ptr=q, qt_ptr=qt, sums_ptr=partial, M_PADDED=padded(M),
            N=(H + 2 * KV) * D, ROWS=in_rows, TRANSPOSED=in_columns, BIAS=bias, num_warps=WARPS,
            **inputs, **shapes, **blocks,
        )  # fmt: skip
    return q, qt, scale, partial.sum(0) if bias else sums


_rope_gradient = register(
    "rope_gradient",
    triton=_rope_gradient_triton,
    reference=reference.rope_gradient,
    fake=_empty_gradient,
)


def rope_gradient(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    fmt: Format = E5M2,
    *,
    rows: bool = True,
    transposed: bool = True,
    bias: bool = False,
) -> GradientCodes:
    """Gradient of the joint projection, quantized per tensor.

    Args:
        dq: gradient of q [M, heads D], FP32, BF16 or FP16, contiguous.
        dk: gradient of k [M, kv_heads D].
        dv: gradient of v, of k's shape.
        cos: as in :func:`coat_kernels.rope`.
        sin: likewise.
        fmt: format of the codes.
        rows: write codes [M, N], N = (heads + 2 kv_heads) D, for the input gradient.
        transposed: write codes [N, M'], for the weight gradient: M padded with zeros to a multiple
            of 16.
        bias: sum over the tokens, FP32 [N].

    Raises:
        ValueError: a shape, dtype or layout is wrong.
    """
    check_heads_gradient("rope_gradient", dq, dk, dv, cos, sin)
    results = _rope_gradient(dq, dk, dv, cos, sin, fmt.name, rows, transposed, bias)
    return as_codes(results, bias)
