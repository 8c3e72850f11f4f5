"""Gradient of SwiGLU and GELU, quantized for the GEMMs of the layer before; it exists in FP8 only.

    da = dh activation'(a),   scale = max(amax(da) / max, 2^-126),   q = cast(da / scale)

Two passes read dh and the FP8 copy of a. ``activation_bwd_stats`` finds da's scale and on the way
writes the activation's output again, transposed, which the weight gradient of the layer behind
wants; ``activation_bwd`` writes da's codes in both layouts and, for a bias, sums da over tokens,
in FP32 and a fixed order. Without a scale ``activation_bwd`` looks for it first.
Slopes: ``activation.py``. Reference: ``reference.activation_bwd_stats``, ``activation_bwd``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.activation import ACTIVATIONS, ActivationSaved, check_kind, value_and_slope, width
from coat_kernels.formats import (
    E4M3,
    E5M2,
    Format,
    GradientCodes,
    TensorScaled,
    check_matrix,
    format_of,
    padded,
)
from coat_kernels.gradient import as_codes, empty_gradient, gradient_room
from coat_kernels.launch import NUM_WARPS, TOKENS, Tile, launch, tiled
from coat_kernels.quantize import empty_layouts
from coat_kernels.registry import register
from coat_kernels.scales import new_scale
from coat_kernels.tile import (
    block_amax_bits,
    inverse_scale,
    load_grouped,
    load_tile,
    publish_scale,
    store_codes,
    word_offsets,
)

STATS_TILE = Tile(16, 256, 4)
"""Of the pass that only looks for the scale."""

GRADIENT_TILE = 4096
"""Elements of a tile where codes are written: with 8192 of SwiGLU one program fills an SM."""


@triton.jit
def _gradients(
    dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """FP32 tiles of da, that of the gate and that of up for SwiGLU, else twice the same; of h."""
    dh = load_tile(dh_ptr, o_m, i_n + tl.arange(0, BLOCK_N), m_mn, F)
    a = load_grouped(a_ptr, e_ptr, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N)
    h, slope = value_and_slope(a, KIND)
    da = dh * slope
    dup = da
    output = h
    if KIND == 0:
        up = load_grouped(a_ptr + F, e_ptr + F // GROUP, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N)
        da = dh * up * slope
        dup = dh * h
        output = h * up
    return da, dup, output


@triton.jit(do_not_specialize=TOKENS)
def _activation_bwd_stats_kernel(
    dh_ptr, a_ptr, e_ptr, scale_ptr,  # (M, F), (M, W) FP8, (M, W / GROUP), ()
    output_scale_ptr, ht_ptr,  # (), (F, M_PADDED) FP8
    M, F, W, M_PADDED, tiles_n,
    KIND: tl.constexpr, INVERSE_MAX: tl.constexpr, RECOMPUTE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    da, dup, h = _gradients(
        dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W, KIND, GROUP, BLOCK_M, BLOCK_N
    )
    if RECOMPUTE:
        store_codes(
            h * inverse_scale(output_scale_ptr), ht_ptr, ht_ptr, o_m, i_m, o_n, o_n < F, M,
            M_PADDED, F, M_PADDED, False, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    amax_bits = block_amax_bits(da)
    if KIND == 0:
        amax_bits = tl.maximum(amax_bits, block_amax_bits(dup))
    publish_scale(amax_bits, scale_ptr, INVERSE_MAX)


@triton.jit(do_not_specialize=TOKENS)
def _activation_bwd_apply_kernel(
    dh_ptr, a_ptr, e_ptr, scale_ptr,  # (M, F), (M, W) FP8, (M, W / GROUP), ()
    q_ptr, qt_ptr, sums_ptr,  # (M, W) and (W, M_PADDED) FP8, (rows of tiles, W) FP32 partial sums
    M, F, W, M_PADDED, tiles_n,
    KIND: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < F
    m_mn = (o_m[:, None] < M) & m_n[None, :]
    da, dup, _ = _gradients(
        dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W, KIND, GROUP, BLOCK_M, BLOCK_N
    )
    inverse = inverse_scale(scale_ptr)
    store_codes(
        da * inverse, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, M_PADDED, W, M_PADDED, ROWS,
        TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    o = i_m.to(tl.int64) * W + o_n
    if BIAS:
        tl.store(sums_ptr + o, tl.sum(da, axis=0), mask=m_n)
    if KIND == 0:
        store_codes(
            dup * inverse, q_ptr, qt_ptr, o_m, i_m, F + o_n, m_n, M, M_PADDED, W, M_PADDED, ROWS,
            TRANSPOSED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if BIAS:
            tl.store(sums_ptr + F + o, tl.sum(dup, axis=0), mask=m_n)


def _recompute_tile(kind: str, group: int) -> Tile:
    columns = max(64, group)
    # Of seven tiles the fastest on an H200: small ones for SwiGLU, which takes most registers.
    elements, warps = (2048, 4) if kind == "silu_mul" else (4096, 8)
    return Tile(elements // columns, columns, warps)


def _gradient_tile(kind: str, group: int) -> Tile:
    columns = max(64, group)
    # SwiGLU holds two gradients at a time and needs the registers of twice as many warps.
    warps = NUM_WARPS if kind == "silu_mul" else NUM_WARPS // 2
    return Tile(GRADIENT_TILE // columns, columns, warps)


def _activation_bwd_stats_triton(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, F, W = width(a, kind)
    recompute = output_scale is not None
    _, ht = empty_layouts(M, F, format_of(output_fmt), False, recompute, dh.device)
    group = W // exponents.shape[1]
    rows, tile = (padded(M), _recompute_tile(kind, group)) if recompute else (M, STATS_TILE)
    grid, options = tiled(rows, F, tile)
    scale = new_scale(dh.device)
    launch(
        _activation_bwd_stats_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=scale, output_scale_ptr=output_scale,
        ht_ptr=ht, M=M, F=F, W=W, M_PADDED=padded(M), KIND=ACTIVATIONS.index(kind),
        INVERSE_MAX=1.0 / format_of(fmt).max, RECOMPUTE=recompute, GROUP=group, **options,
    )  # fmt: skip
    return scale, ht


def _activation_bwd_triton(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    M, F, W = width(a, kind)
    q, qt, sums = gradient_room(M, W, a, fmt, rows, transposed, bias)
    if scale is not None:
        found = sums.new_empty(0)
    else:
        found, _ = _activation_bwd_stats_triton(dh, a, exponents, kind, None, fmt, fmt)
    group = W // exponents.shape[1]
    grid, options = tiled(padded(M) if transposed else M, F, _gradient_tile(kind, group))
    partial = sums.new_empty((grid[0] // options["tiles_n"], W)) if bias else sums
    launch(
        _activation_bwd_apply_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=found if scale is None else scale, q_ptr=q,
        qt_ptr=qt, sums_ptr=partial, M=M, F=F, W=W, M_PADDED=padded(M),
        KIND=ACTIVATIONS.index(kind), ROWS=rows, TRANSPOSED=transposed, BIAS=bias, GROUP=group,
        **options,
    )  # fmt: skip
    return q, qt, found, partial.sum(0) if bias else sums


def _fake_activation_bwd(
    _dh: Tensor, a: Tensor, _exponents: Tensor, _kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, qt, found, sums = empty_gradient(a.shape[0], a.shape[1], a, fmt, rows, transposed, bias)
    return q, qt, found if scale is None else sums.new_empty(0), sums


_activation_bwd_stats = register(
    "activation_bwd_stats",
    triton=_activation_bwd_stats_triton,
    reference=reference.activation_bwd_stats,
    fake=lambda dh, a, _exponents, kind, output_scale, output_fmt, _fmt: (
        dh.new_empty((), dtype=torch.float32),
        empty_layouts(
            *width(a, kind)[:2], format_of(output_fmt), False, output_scale is not None, a.device
        )[1],
    ),
)
_activation_bwd = register(
    "activation_bwd",
    triton=_activation_bwd_triton,
    reference=reference.activation_bwd,
    fake=_fake_activation_bwd,
)


def activation_bwd_stats(
    dh: Tensor, saved: ActivationSaved, kind: str, *, fmt: Format = E5M2, output_fmt: Format = E4M3
) -> tuple[Tensor, TensorScaled]:
    """What one read of dh and the copy gives before the codes of the gradient.

    Args:
        dh: gradient of h [M, F], contiguous.
        saved: from the forward pass.
        kind: the same kind.
        fmt: format of the gradient's codes.
        output_fmt: of the output's.

    Returns:
        The scale of :func:`activation_bwd`, FP32 [], and the activation's output again, transposed
        [F, M'], as :func:`coat_kernels.activation_recompute` makes it.

    Raises:
        ValueError: dh is not a contiguous matrix of h's shape, or there is no such kind.
    """
    _check("activation_bwd_stats", dh, saved, kind)
    scale, ht = _activation_bwd_stats(
        dh, saved.a.q, saved.a.exponents, kind, saved.scale, output_fmt.name, fmt.name
    )
    return scale, TensorScaled(ht, saved.scale)


def _check(op: str, dh: Tensor, saved: ActivationSaved, kind: str) -> None:
    check_kind(kind)
    M, F, _ = width(saved.a.q, kind)
    check_matrix(op, "dh", dh, (M, F))


def activation_bwd(
    dh: Tensor,
    saved: ActivationSaved,
    kind: str,
    *,
    rows: bool = True,
    transposed: bool = True,
    bias: bool = False,
    fmt: Format = E5M2,
    scale: Tensor | None = None,
) -> GradientCodes:
    """Gradient of :func:`activation_fwd`'s input, quantized per tensor; it exists in FP8 only.

    Args:
        dh: gradient of h [M, F], contiguous.
        saved: from the forward pass.
        kind: the same kind.
        rows: write codes [M, W], for the input gradient of the layer before.
        transposed: write codes [W, M'], for that layer's weight gradient.
        bias: sum over the tokens, for its bias.
        fmt: format of the codes.
        scale: of :func:`activation_bwd_stats` in this format; looked for when absent.

    Raises:
        ValueError: dh is not a contiguous matrix of h's shape, or there is no such kind.
    """
    _check("activation_bwd", dh, saved, kind)
    q, qt, found, sums = _activation_bwd(
        dh, saved.a.q, saved.a.exponents, kind, fmt.name, rows, transposed, bias, scale
    )
    return as_codes((q, qt, found if scale is None else scale, sums), bias)
