"""RoPE on a fused QKV projection, split into q, k, v; its gradient is quantized for the GEMMs.

Per head, with the two halves of its D channels (x1, x2) and of the embedding (c1, c2), (s1, s2):

    y1 = x1 c1 - x2 s1,   y2 = x2 c2 + x1 s2             (q and k; v unchanged)

    dx1 = dy1 c1 + dy2 s2,   dx2 = dy2 c2 - dy1 s1
    scale = max(amax(dx) / max, 2^-126),   q8 = cast(dx / scale),   db = sum over tokens of dx

Forward: q and k are rotated, v is copied, so that no view keeps the fused matrix alive. Arithmetic
is FP32 with one rounding (transformers rounds each product).

Backward: the gradients of the heads are rotated back and quantized for the projection's GEMMs. dx
is never in memory: dq, dk and dv are read twice, for the amax and for the FP8 data of both layouts.

Formula: Su et al., arXiv 2104.09864, equation 34, in the half-split order of Llama. Reference:
``reference/rope.py``.
"""

import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    inverse_scale,
    load_halves,
    magnitude_bits,
    publish_scale,
    row_offsets,
    store_halves,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E5M2,
    Format,
    QuantizedGradient,
    check_matrix,
    get_format,
    pad_length,
)
from coat_kernels.launch import TOKENS, cdiv, launch, plan_passes
from coat_kernels.quantize import allocate_gradient, empty_gradient, to_quantized_gradient
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale
from coat_kernels.shared_scales import finish_scale

BLOCK_ROWS = 16
"""Tokens per program."""

BACK_ROWS = 32
"""Tokens per program of the gradient: with 64 the tiles of both layouts use so many registers that
one program fills a multiprocessor."""

BLOCK_HEADS = 8
"""Heads per program; cos and sin stay in registers for all of them."""

BACK_WARPS = 2
"""Warps of a program that writes the gradient."""

STATS_WARPS = 8
"""Warps of a program that computes the amax."""


@triton.jit
def _head_pointer(q_ptr, k_ptr, v_ptr, head, H, KV, size):
    """Return the address of a head in the first row; heads are counted through q, k and v."""
    part = q_ptr + head * size
    if head >= H:
        part = k_ptr + (head - H) * size
    if head >= H + KV:
        part = v_ptr + (head - H - KV) * size
    return part


@triton.jit(do_not_specialize=TOKENS)
def _rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr,  # (M, (H + 2 KV) D), (R, D), (R, D)
    q_ptr, k_ptr, v_ptr,  # (M, H D), (M, KV D), (M, KV D)
    M, R, H, KV, D,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    o_m = row_offsets(tl.program_id(0), BLOCK_M)
    m_m = o_m < M
    c1, c2 = load_halves(cos_ptr, o_m % R, D, m_m, D, HALF)
    s1, s2 = load_halves(sin_ptr, o_m % R, D, m_m, D, HALF)
    heads = H + 2 * KV
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        # The head's address in q, k or v, and in the fused matrix.
        part = _head_pointer(q_ptr, k_ptr, v_ptr, head, H, KV, D)
        stride = (H if head < H else KV) * D
        fused = qkv_ptr + head * D
        mask = m_m & (head < heads)
        x1, x2 = load_halves(fused, o_m, heads * D, mask, D, HALF)
        y1, y2 = x1, x2
        if head < H + KV:
            y1 = x1 * c1 - x2 * s1
            y2 = x2 * c2 + x1 * s2
        store_halves(part, o_m, stride, mask, D, y1, y2, HALF)


@triton.jit
def _rotate_back(
    dq_ptr, dk_ptr, dv_ptr, c1, c2, s1, s2, head, o_m, m_m, H, KV, D, HALF: tl.constexpr
):
    """Compute FP32 halves [BLOCK_M, HALF] of a head's gradient; zero outside the mask."""
    part = _head_pointer(dq_ptr, dk_ptr, dv_ptr, head, H, KV, D)
    stride = (H if head < H else KV) * D
    mask = m_m & (head < H + 2 * KV)
    y1, y2 = load_halves(part, o_m, stride, mask, D, HALF)
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
    c1, c2 = load_halves(cos_ptr, o_m % R, D, m_m, D, HALF)
    s1, s2 = load_halves(sin_ptr, o_m % R, D, m_m, D, HALF)
    bits = tl.zeros((BLOCK_M, HALF), dtype=tl.int32)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        x1, x2 = _rotate_back(
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
    c1, c2 = load_halves(cos_ptr, o_m % R, D, m_m, D, HALF)
    s1, s2 = load_halves(sin_ptr, o_m % R, D, m_m, D, HALF)
    inverse = inverse_scale(scale_ptr)
    o_h = tl.arange(0, HALF)
    for i in range(BLOCK_H):
        head = tl.program_id(1) * BLOCK_H + i
        x1, x2 = _rotate_back(
            dq_ptr, dk_ptr, dv_ptr, c1, c2, s1, s2, head, o_m, m_m, H, KV, D, HALF
        )
        m_n = (o_h < D // 2) & (head < H + 2 * KV)
        o_n = head * D + o_h
        store_quantized(
            x1 * inverse, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, M_PADDED, N, M_PADDED, ROWS,
            TRANSPOSED, BLOCK_M, HALF,
        )  # fmt: skip
        store_quantized(
            x2 * inverse, q_ptr, qt_ptr, o_m, i_m, o_n + D // 2, m_n, M, M_PADDED, N, M_PADDED,
            ROWS, TRANSPOSED, BLOCK_M, HALF,
        )  # fmt: skip
        if BIAS:
            o = i_m.to(tl.int64) * N + o_n
            tl.store(sums_ptr + o, tl.sum(x1, axis=0), mask=m_n)
            tl.store(sums_ptr + o + D // 2, tl.sum(x2, axis=0), mask=m_n)


def _empty_heads(
    qkv: Tensor, cos: Tensor, _sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate q, k and v."""
    M, D = qkv.shape[0], cos.shape[1]
    q = qkv.new_empty(M, heads * D)
    return q, qkv.new_empty(M, kv_heads * D), qkv.new_empty(M, kv_heads * D)


@register(fake=_empty_heads)
def _rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _empty_heads(qkv, cos, sin, heads, kv_heads)
    M, (R, D) = qkv.shape[0], cos.shape
    launch(
        _rope_kernel, (cdiv(M, BLOCK_ROWS), cdiv(heads + 2 * kv_heads, BLOCK_HEADS)), num_warps=4,
        qkv_ptr=qkv, cos_ptr=cos, sin_ptr=sin, q_ptr=q, k_ptr=k, v_ptr=v,
        M=M, R=R, H=heads, KV=kv_heads, D=D, HALF=triton.next_power_of_2(D // 2),
        BLOCK_M=BLOCK_ROWS, BLOCK_H=BLOCK_HEADS,
    )  # fmt: skip
    return q, k, v


@register(
    fake=lambda dq, dk, dv, _cos, _sin, *rest: empty_gradient(
        dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1], dq, *rest
    ),
)
def _rope_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, rows: bool,
    transposed: bool, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    M, (R, D) = dq.shape[0], cos.shape
    H, KV = dq.shape[1] // D, dk.shape[1] // D
    N = (H + 2 * KV) * D
    q, qt, sums = allocate_gradient(M, N, dq, fmt, rows, transposed, bias)
    scale = new_scale(dq.device)
    heads, tiles = cdiv(H + 2 * KV, BLOCK_HEADS), cdiv(M, BACK_ROWS)
    common = {
        "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "cos_ptr": cos, "sin_ptr": sin,
        "scale_ptr": scale, "M": M, "R": R, "H": H, "KV": KV, "D": D,
        "HALF": triton.next_power_of_2(D // 2), "BLOCK_M": BACK_ROWS, "BLOCK_H": BLOCK_HEADS,
    }  # fmt: skip
    launch(
        _rope_gradient_stats_kernel, (tiles, heads), num_warps=STATS_WARPS,
        INVERSE_MAX=1.0 / get_format(fmt).max, **common,
    )  # fmt: skip
    scale = finish_scale(scale)
    if not (rows or transposed or bias):
        return q, qt, scale, sums
    tiles = cdiv(pad_length(M) if transposed else M, BACK_ROWS)
    partial = sums.new_empty((tiles, N)) if bias else sums
    for in_rows, in_columns in plan_passes(rows, transposed, D):
        launch(
            _rope_gradient_kernel, (tiles, heads), num_warps=BACK_WARPS,
            q_ptr=q, qt_ptr=qt, sums_ptr=partial, M_PADDED=pad_length(M), N=N, ROWS=in_rows,
            TRANSPOSED=in_columns, BIAS=bias, **common,
        )  # fmt: skip
    return q, qt, scale, partial.sum(0) if bias else sums


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection [M, (heads + 2 kv_heads) D], FP32, BF16 or FP16; rotate q and k.

    Token m uses row m % R of cos and sin [R, D], so sequences of R tokens share them. D is even.
    Returns q [M, heads D], k and v [M, kv_heads D], in qkv's dtype.
    """
    check_matrix("rope", "qkv", qkv)
    check_embedding("rope", qkv.shape[0], cos, sin)
    if qkv.shape[1] != (heads + 2 * kv_heads) * cos.shape[1] or min(heads, kv_heads) < 1:
        raise ValueError(
            f"rope: qkv has {qkv.shape[1]} columns; {heads} heads of q and {kv_heads} of k and v "
            f"with {cos.shape[1]} channels each make {(heads + 2 * kv_heads) * cos.shape[1]}"
        )
    return _rope(qkv, cos, sin, heads, kv_heads)


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
) -> QuantizedGradient:
    """Compute the gradient of the fused QKV projection in per-tensor FP8.

    dq [M, heads D], dk and dv [M, kv_heads D] are contiguous; ``rows``, ``transposed`` and ``bias``
    as in :func:`quantize_gradient`.
    """
    check_matrix("rope_gradient", "dq", dq)
    check_matrix("rope_gradient", "dk", dk)
    check_matrix("rope_gradient", "dv", dv, (dk.shape[0], dk.shape[1]))
    check_embedding("rope_gradient", dq.shape[0], cos, sin)
    D = cos.shape[1]
    if dq.shape[0] != dk.shape[0] or dq.shape[1] % D or dk.shape[1] % D:
        raise ValueError(
            f"rope_gradient: dq has shape {tuple(dq.shape)} and dk {tuple(dk.shape)}; both need "
            f"the same number of rows and a multiple of {D} columns, one head's channels"
        )
    made = _rope_gradient(dq, dk, dv, cos, sin, fmt.name, rows, transposed, bias)
    return to_quantized_gradient(*made, bias=bias)


def check_embedding(op: str, tokens: int, cos: Tensor, sin: Tensor) -> None:
    """Check the rotary embedding of a function's ``tokens``."""
    check_matrix(op, "cos", cos)
    check_matrix(op, "sin", sin, (cos.shape[0], cos.shape[1]))
    R, D = cos.shape
    if not R or tokens % R or D < 2 or D % 2:
        raise ValueError(
            f"{op}: cos has shape {(R, D)} for {tokens} tokens; its rows must divide the tokens, "
            "its columns, one head's channels, must be even"
        )
