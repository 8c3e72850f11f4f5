"""SwiGLU and GELU on what a GEMM wrote, saving only an FP8 copy of it for the backward pass.

    silu_mul     h = silu(gate) * up,  a = [gate | up]      (M, 2F) -> (M, F)
    gelu         h = a * Phi(a)                             (M, F)  -> (M, F)
    gelu_tanh    h = a * sigmoid(2 u),  u = sqrt(2 / pi) (a + 0.044715 a^3)
    quick_gelu   h = a * sigmoid(1.702 a)

Forward: ``activation_stats`` reads a once: its group-scaled copy (saved: W + W / G bytes per token
for a's width W) and h's amax. ``activation_apply`` reads a (forward) or the copy (backward) and
writes h's per-tensor codes, row-major or transposed: h itself is never stored. (1 + tanh(u)) / 2 =
sigmoid(2 u) saves a tanh.

Backward: the gradient is quantized for the GEMMs of the layer before and exists in FP8 only.

    da = dh activation'(a),   scale = max(amax(da) / max, 2^-126),   q = cast(da / scale)

Both passes read dh and the FP8 copy of a. ``activation_bwd_stats`` finds da's scale and on the way
writes the activation's output again, transposed, for the weight gradient of the layer behind;
``activation_bwd`` writes da's codes in both layouts and, for a bias, sums da over tokens, in FP32
and a fixed order.

Formulas: Hendrycks & Gimpel, arXiv 1606.08415; Shazeer, arXiv 2002.05202. Slopes:
``kernels/README.md``. Reference: ``reference/activation.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.device import (
    block_amax_bits,
    inverse_scale,
    load_grouped,
    load_tile,
    magnitude_bits,
    publish_scale,
    row_offsets,
    sigmoid_base2,
    store_codes,
    store_grouped,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    E5M2,
    Format,
    GradientCodes,
    GroupScaled,
    TensorScaled,
    check_group,
    check_matrix,
    format_of,
    padded,
)
from coat_kernels.launch import NUM_WARPS, TOKENS, Tile, launch, tiled
from coat_kernels.quantize import as_codes, empty_layouts, gradient_room
from coat_kernels.quantize_blockwise import empty_grouped
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale

ACTIVATIONS = reference.ACTIVATIONS

ROWS_TILE = Tile(16, 256, 4)
"""Of passes that write rows or only look for a scale: the fastest of three on an H200 for the MLPs
of SigLIP and Llama."""

TRANSPOSED_TILE = Tile(64, 128, 8)
"""Of the output made again, transposed: likewise, of five."""

GRADIENT_TILE = 4096
"""Elements of a tile where codes are written: with 8192 of SwiGLU one program fills an SM."""


@triton.jit
def value_and_slope(a, KIND: tl.constexpr):
    """Activation of one input and its derivative, KIND counting ACTIVATIONS."""
    if KIND == 1:
        cdf = 0.5 * (1.0 + tl.math.erf(a * 0.7071067811865476))
        return a * cdf, cdf + a * tl.exp(-0.5 * a * a) * 0.3989422804014327
    else:
        # a * s with s = sigmoid(inner): the derivative is s + h (1 - s) inner'. Written so that it
        # takes few instructions, log2(e) in the constants: these kernels are as much bound by them
        # as by the bytes.
        slope = 1.0
        if KIND == 2:
            squared = a * a
            s = sigmoid_base2(a * (-2.302208198144325 + -0.10294323460783883 * squared))
            slope = 1.5957691216057308 + 0.21406443847843341 * squared
        elif KIND == 3:
            s = sigmoid_base2(-2.4554669595930156 * a)
            slope = 1.702
        else:
            s = sigmoid_base2(-1.4426950408889634 * a)
        h = a * s
        return h, s + (h - h * s) * slope


@triton.jit(do_not_specialize=TOKENS)
def _activation_stats_kernel(
    a_ptr, q_ptr, e_ptr, scale_ptr,  # (M, W), (M, W) FP8, (M, W / GROUP), ()
    M, F, W, tiles_n,
    KIND: tl.constexpr, MAX_EXPONENT: tl.constexpr, INVERSE_MAX: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    o_m = row_offsets(pid // tiles_n, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    a = load_tile(a_ptr, o_m, o_n, m_mn, W)
    e = store_grouped(a, q_ptr, e_ptr, o_m, i_n, M, F, W, MAX_EXPONENT, GROUP, BLOCK_M, BLOCK_N)
    if KIND == 0:
        h, _ = value_and_slope(a, KIND)
        up = load_tile(a_ptr + F, o_m, o_n, m_mn, W)
        store_grouped(
            up, q_ptr + F, e_ptr + F // GROUP, o_m, i_n, M, F, W, MAX_EXPONENT, GROUP, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        amax_bits = block_amax_bits(h * up)
    else:
        # GELUs grow with a > 0 and stay above -0.18: beside an a > 0.5, whose h is larger, only the
        # largest a matters. As integers, floats of which one is positive have the same maximum.
        largest = tl.max(tl.max(a.to(tl.int32, bitcast=True), axis=1), axis=0)
        largest = largest.to(tl.float32, bitcast=True)
        if (largest > 0.5) & (tl.max(tl.max(e, axis=1), axis=0) < 255):
            amax_bits = magnitude_bits(value_and_slope(largest, KIND)[0])
        else:
            amax_bits = block_amax_bits(value_and_slope(a, KIND)[0])
    publish_scale(amax_bits, scale_ptr, INVERSE_MAX)


@triton.jit(do_not_specialize=TOKENS)
def _activation_apply_kernel(
    a_ptr, e_ptr, scale_ptr, q_ptr, qt_ptr,  # (M, W), (M, W / GROUP), (), (M, F), (F, M_PADDED)
    M, F, W, M_PADDED, tiles_n,
    KIND: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    if GROUPED:
        a = load_grouped(a_ptr, e_ptr, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N)
    else:
        a = load_tile(a_ptr, o_m, o_n, m_mn, W)
    h, _ = value_and_slope(a, KIND)
    if KIND == 0:
        if GROUPED:
            h *= load_grouped(
                a_ptr + F, e_ptr + F // GROUP, o_m, i_n, M, F, W, GROUP, BLOCK_M, BLOCK_N
            )
        else:
            h *= load_tile(a_ptr + F, o_m, o_n, m_mn, W)
    inverse = inverse_scale(scale_ptr)
    store_codes(
        h * inverse, q_ptr, qt_ptr, o_m, i_m, o_n, o_n < F, M, M_PADDED, F, M_PADDED, ROWS,
        TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


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


def _width(a: Tensor, kind: str) -> tuple[int, int, int]:
    """M, F and W of the activation's input."""
    M, W = a.shape
    return M, W // 2 if kind == "silu_mul" else W, W


@register(
    fake=lambda a, _kind, group_size, fmt: (
        *empty_grouped(a, group_size, fmt),
        a.new_empty((), dtype=torch.float32),
    ),
)
def _activation_stats(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor]:
    form = format_of(fmt)
    M, F, W = _width(a, kind)
    q, exponents = empty_grouped(a, group_size, fmt)
    grid, options = tiled(M, F, ROWS_TILE)
    scale = new_scale(a.device)
    launch(
        _activation_stats_kernel, grid,
        a_ptr=a, q_ptr=q, e_ptr=exponents, scale_ptr=scale, M=M, F=F, W=W,
        KIND=ACTIVATIONS.index(kind),
        MAX_EXPONENT=form.max_exponent, INVERSE_MAX=1.0 / form.max, GROUP=group_size, **options,
    )  # fmt: skip
    return q, exponents, scale


@register(
    fake=lambda a, _exponents, kind, _scale, *layout: empty_layouts(
        len(a), _width(a, kind)[1], a, *layout
    ),
)
def _activation_apply(
    a: Tensor, exponents: Tensor | None, kind: str, scale: Tensor, fmt: str, rows: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, F, W = _width(a, kind)
    q, qt = empty_layouts(M, F, a, fmt, rows, transposed)
    group = 1 if exponents is None else W // exponents.shape[1]
    tile = TRANSPOSED_TILE if transposed else ROWS_TILE
    grid, options = tiled(padded(M) if transposed else M, F, tile)
    launch(
        _activation_apply_kernel, grid,
        a_ptr=a, e_ptr=exponents, scale_ptr=scale, q_ptr=q, qt_ptr=qt, M=M, F=F, W=W,
        M_PADDED=padded(M), KIND=ACTIVATIONS.index(kind),
        GROUPED=exponents is not None, ROWS=rows, TRANSPOSED=transposed,
        GROUP=group, **options,
    )  # fmt: skip
    return q, qt


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


@register(
    fake=lambda dh, a, _exponents, kind, output_scale, fmt, _: (
        dh.new_empty((), dtype=torch.float32),
        empty_layouts(len(a), _width(a, kind)[1], a, fmt, False, output_scale is not None)[1],
    ),
)
def _activation_bwd_stats(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, F, W = _width(a, kind)
    recompute = output_scale is not None
    _, ht = empty_layouts(M, F, dh, output_fmt, False, recompute)
    group = W // exponents.shape[1]
    rows, tile = (padded(M), _recompute_tile(kind, group)) if recompute else (M, ROWS_TILE)
    grid, options = tiled(rows, F, tile)
    scale = new_scale(dh.device)
    launch(
        _activation_bwd_stats_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=scale, output_scale_ptr=output_scale,
        ht_ptr=ht, M=M, F=F, W=W, M_PADDED=padded(M), KIND=ACTIVATIONS.index(kind),
        INVERSE_MAX=1.0 / format_of(fmt).max, RECOMPUTE=recompute, GROUP=group, **options,
    )  # fmt: skip
    return scale, ht


@register(
    fake=lambda _, a, __, ___, *layout: gradient_room(len(a), a.shape[1], a, *layout[:-1]),
)
def _activation_bwd(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, F, W = _width(a, kind)
    q, qt, sums = gradient_room(M, W, a, fmt, rows, transposed, bias)
    group = W // exponents.shape[1]
    grid, options = tiled(padded(M) if transposed else M, F, _gradient_tile(kind, group))
    partial = sums.new_empty((grid[0] // options["tiles_n"], W)) if bias else sums
    launch(
        _activation_bwd_apply_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=scale, q_ptr=q, qt_ptr=qt,
        sums_ptr=partial, M=M, F=F, W=W, M_PADDED=padded(M), KIND=ACTIVATIONS.index(kind),
        ROWS=rows, TRANSPOSED=transposed, BIAS=bias, GROUP=group, **options,
    )  # fmt: skip
    return q, qt, partial.sum(0) if bias else sums


class ActivationSaved(NamedTuple):
    """What an activation keeps for its backward pass."""

    a: GroupScaled
    """The input, [M, W]."""
    scale: Tensor
    """Per-tensor scale of the output, FP32 []."""


def activation_fwd(
    a: Tensor, kind: str, *, group_size: int, fmt: Format = E4M3
) -> tuple[TensorScaled, ActivationSaved]:
    """Activate and quantize per tensor.

    Args:
        a: FP32, BF16 or FP16, contiguous: [M, 2F] = [gate | up] for ``silu_mul``, else [M, F].
        kind: one of ``ACTIVATIONS``.
        group_size: group size of the copy of a that is kept; divides F.
        fmt: format of the codes of h and of that copy.

    Returns:
        h's codes [M, F], and what backward needs.

    Raises:
        ValueError: the kind, shape, dtype or group size does not fit.
    """
    check_matrix("activation_fwd", "a", a)
    _check_kind(kind)
    if kind == "silu_mul" and a.shape[1] % 2:
        raise ValueError(f"silu_mul: a has {a.shape[1]} columns; give [gate | up], an even number")
    check_group("activation_fwd", _width(a, kind)[1], group_size)
    q, exponents, scale = _activation_stats(a, kind, group_size, fmt.name)
    h, _ = _activation_apply(a, None, kind, scale, fmt.name, True, False)
    return TensorScaled(h, scale), ActivationSaved(GroupScaled(q, exponents), scale)


def activation_recompute(saved: ActivationSaved, kind: str, fmt: Format = E4M3) -> TensorScaled:
    """The activation's output again, from the FP8 copy, transposed [F, M'].

    Raises:
        ValueError: there is no such kind.
    """
    _check_kind(kind)
    _, ht = _activation_apply(
        saved.a.q, saved.a.exponents, kind, saved.scale, fmt.name, False, True
    )
    return TensorScaled(ht, saved.scale)


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
    a, exponents = saved.a
    if scale is None:
        found, _ = _activation_bwd_stats(dh, a, exponents, kind, None, fmt.name, fmt.name)
    else:
        found = scale
    q, qt, sums = _activation_bwd(dh, a, exponents, kind, fmt.name, rows, transposed, bias, found)
    return as_codes(q, qt, found, sums, bias=bias)


def _check_kind(kind: str) -> None:
    """Refuse an activation that has no kernel.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")


def _check(op: str, dh: Tensor, saved: ActivationSaved, kind: str) -> None:
    _check_kind(kind)
    M, F, _ = _width(saved.a.q, kind)
    check_matrix(op, "dh", dh, (M, F))
