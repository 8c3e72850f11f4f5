"""SwiGLU, GeGLU and GELU of a GEMM's output, saving the input in FP8 for backward.

    silu_mul        h = silu(gate) * up,  a = [gate | up]   (M, 2F) -> (M, F)
    gelu_tanh_mul   h = gelu_tanh(gate) * up                (M, 2F) -> (M, F)
    gelu            h = a * Phi(a)                          (M, F)  -> (M, F)
    gelu_tanh       h = a * sigmoid(2 u),  u = sqrt(2 / pi) (a + 0.044715 a^3)
    quick_gelu      h = a * sigmoid(1.702 a)

Forward: ``activation_stats`` reads a once and computes group-scaled a (saved: W + W / G bytes per
token for a's width W and groups of G) and h's amax. ``activation_apply`` reads a again and writes h
in per-tensor FP8: h is never stored in high precision.

Forward, ``activation_once``: large inputs (``ONE_PASS``) are read once, unless processes share
scales. h's scale is guessed from a sample, every 16th row, with a margin of 2: normal FP8 numbers
lose nothing, and the subnormal range begins one binade higher. The pass that
writes h also computes the exact scale. If that is larger than the guess, values have saturated, and
a last launch writes h again; else it does nothing.

    guess = max(2 amax(every 16th row) / max, 2^-126),   scale = max(guess, amax / max)

Backward: the gradient is quantized for the preceding layer's GEMMs and exists in FP8 only.

    da = dh activation'(a),   scale = max(amax(da) / max, 2^-126),   q = cast(da / scale)

``activation_bwd_stats`` computes da's scale and recomputes h, transposed, for the following layer's
grad-weight GEMM. ``activation_bwd`` writes da in FP8 in both layouts and, for a bias, sums da over
tokens, in FP32 and a fixed order. Both read dh and group-scaled a.

``activation_bwd_once`` is for frozen layers, whose GEMMs read no transposed data: it reads dh and a
once, with da's scale guessed as above, and writes da and, for an adapter, h row-major.

Formulas: Hendrycks & Gimpel, arXiv 1606.08415; Shazeer, arXiv 2002.05202. Slopes:
``kernels/README.md``. Reference: ``reference/activation.py``.
"""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.activation_tiles import NUM_GATED, gradients, value_and_slope
from coat_kernels.device import (
    block_amax_bits,
    inverse_scale,
    load_tile,
    magnitude_bits,
    publish_scale,
    row_offsets,
    store_grouped,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    E5M2,
    GroupScaled,
    QuantizedGradient,
    TensorScaled,
    check_group,
    check_matrix,
    get_format,
    pad_length,
)
from coat_kernels.launch import NUM_WARPS, TOKENS, Tile, cdiv, count_sms, launch, tile_grid
from coat_kernels.quantize import allocate_gradient, empty_layouts, to_quantized_gradient
from coat_kernels.quantize_blockwise import empty_grouped
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale
from coat_kernels.shared_scales import are_shared, finish_scale

ACTIVATIONS = reference.ACTIVATIONS
is_gated = reference.is_gated

ROWS_TILE = Tile(16, 256, 4)
"""Tile of passes that write row-major data or only compute a scale: the fastest of three on an H200
for the MLPs of SigLIP and Llama."""

FROZEN_TILE = Tile(4, 512, 4)
"""Tile of ``activation_bwd_once``: the fastest of nine on an H200 for SwiGLU."""

ONE_PASS = 2**25
"""Elements of h from which a tensor is read once: below, a third launch takes as long as a read."""

SAMPLE_EVERY = reference.SAMPLE_EVERY
MARGIN = reference.MARGIN

GRADIENT_TILE = 4096
"""Elements of a tile of the gradient pass: with 8192 of SwiGLU one program fills an SM."""


@triton.jit(do_not_specialize=TOKENS)
def _activation_stats_kernel(
    a_ptr, q_ptr, e_ptr, scale_ptr,  # (M, W), (M, W) FP8, (M, W / GROUP), ()
    guess_ptr, h_ptr,  # (), (M, F) FP8
    M, F, W, tiles_n,
    KIND: tl.constexpr, MAX_EXPONENT: tl.constexpr, INVERSE_MAX: tl.constexpr, GROUP: tl.constexpr,
    EVERY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = row_offsets(i_m, BLOCK_M) * EVERY
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    a = load_tile(a_ptr, o_m, o_n, m_mn, W)
    if q_ptr is not None:
        e = store_grouped(a, q_ptr, e_ptr, o_m, i_n, M, F, W, MAX_EXPONENT, GROUP, BLOCK_M, BLOCK_N)
    if KIND >= NUM_GATED and q_ptr is not None and h_ptr is None:
        # GELUs increase for a > 0 and stay above -0.18: if some a > 0.5, whose |h| is larger, only
        # the largest a matters. Integer and float maximum agree if one float is positive.
        largest = tl.max(tl.max(a.to(tl.int32, bitcast=True), axis=1), axis=0)
        largest = largest.to(tl.float32, bitcast=True)
        if (largest > 0.5) & (tl.max(tl.max(e, axis=1), axis=0) < 255):
            amax_bits = magnitude_bits(value_and_slope(largest, KIND)[0])
        else:
            amax_bits = block_amax_bits(value_and_slope(a, KIND)[0])
    else:
        h, _ = value_and_slope(a, KIND)
        if KIND < NUM_GATED:
            up = load_tile(a_ptr + F, o_m, o_n, m_mn, W)
            if q_ptr is not None:
                store_grouped(
                    up, q_ptr + F, e_ptr + F // GROUP, o_m, i_n, M, F, W, MAX_EXPONENT, GROUP,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
            h *= up
        if h_ptr is not None:
            store_quantized(
                h * inverse_scale(guess_ptr), h_ptr, h_ptr, o_m, i_m, o_n, o_n < F, M, M, F, M,
                True, False, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        amax_bits = block_amax_bits(h)
    publish_scale(amax_bits, scale_ptr, INVERSE_MAX)


@triton.jit
def _apply_tile(
    pid, a_ptr, scale_ptr, q_ptr, M, F, W, tiles_n,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i_m = pid // tiles_n  # tiles are counted along the row first
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    h, _ = value_and_slope(load_tile(a_ptr, o_m, o_n, m_mn, W), KIND)
    if KIND < NUM_GATED:
        h *= load_tile(a_ptr + F, o_m, o_n, m_mn, W)
    store_quantized(
        h * inverse_scale(scale_ptr), q_ptr, q_ptr, o_m, i_m, o_n, o_n < F, M, M, F, M, True, False,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=TOKENS)
def _activation_apply_kernel(
    a_ptr, scale_ptr, q_ptr,  # (M, W), (), (M, F)
    M, F, W, tiles_n, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    _apply_tile(tl.program_id(0), a_ptr, scale_ptr, q_ptr, M, F, W, tiles_n, KIND, BLOCK_M, BLOCK_N)


@triton.jit
def _finish_guess(scale_ptr, guess_ptr):
    """Raise the exact scale to the guess; return whether it was larger, so that values saturated.

    Programs may read the scale after the first one has raised it: the answer is the same.
    """
    exact = tl.load(scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True))
    guess = tl.load(guess_ptr.to(tl.pointer_type(tl.int32), bitcast=True))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True), tl.maximum(exact, guess))
    return exact > guess


@triton.jit(do_not_specialize=(*TOKENS, "tiles"))  # both depend on the number of tokens
def _activation_again_kernel(
    a_ptr, scale_ptr, guess_ptr, q_ptr,  # (M, W), (), (), (M, F)
    M, F, W, tiles, tiles_n, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if _finish_guess(scale_ptr, guess_ptr):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _apply_tile(
                tile, a_ptr, scale_ptr, q_ptr, M, F, W, tiles_n, KIND, BLOCK_M, BLOCK_N
            )  # fmt: skip


@triton.jit(do_not_specialize=TOKENS)
def _activation_bwd_stats_kernel(
    dh_ptr, a_ptr, e_ptr, scale_ptr,  # (M, F), (M, W) FP8, (M, W / GROUP), ()
    output_scale_ptr, ht_ptr,  # (), (F, M_PADDED) FP8; null without h
    M, F, W, M_PADDED, tiles_n,
    KIND: tl.constexpr, INVERSE_MAX: tl.constexpr, GROUP: tl.constexpr, EVERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M) * EVERY
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_mn = (o_m[:, None] < M) & (o_n[None, :] < F)
    da, dup, h = gradients(
        dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W, KIND, GROUP, BLOCK_M, BLOCK_N
    )
    if ht_ptr is not None:
        store_quantized(
            h * inverse_scale(output_scale_ptr), ht_ptr, ht_ptr, o_m, i_m, o_n, o_n < F, M,
            M_PADDED, F, M_PADDED, False, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    amax_bits = block_amax_bits(da)
    if KIND < NUM_GATED:
        amax_bits = tl.maximum(amax_bits, block_amax_bits(dup))
    publish_scale(amax_bits, scale_ptr, INVERSE_MAX)


@triton.jit
def _bwd_tile(
    pid, dh_ptr, a_ptr, e_ptr, scale_ptr, q_ptr, qt_ptr, sums_ptr, output_scale_ptr, h_ptr,
    M, F, W, M_PADDED, tiles_n, KIND: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store what is not None of a tile; return the bits of da's largest magnitude."""
    i_m = pid // tiles_n  # tiles are counted along the row first
    o_m = word_offsets(i_m, BLOCK_M)
    i_n = pid % tiles_n * BLOCK_N
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < F
    m_mn = (o_m[:, None] < M) & m_n[None, :]
    da, dup, h = gradients(
        dh_ptr, a_ptr, e_ptr, o_m, i_n, m_mn, M, F, W, KIND, GROUP, BLOCK_M, BLOCK_N
    )
    if h_ptr is not None:
        store_quantized(
            h * inverse_scale(output_scale_ptr), h_ptr, h_ptr, o_m, i_m, o_n, m_n, M, M, F, M,
            True, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    inverse = inverse_scale(scale_ptr)
    store_quantized(
        da * inverse, q_ptr, qt_ptr, o_m, i_m, o_n, m_n, M, M_PADDED, W, M_PADDED, ROWS,
        TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    bits = block_amax_bits(da)
    o = i_m.to(tl.int64) * W + o_n
    if sums_ptr is not None:
        tl.store(sums_ptr + o, tl.sum(da, axis=0), mask=m_n)
    if KIND < NUM_GATED:
        store_quantized(
            dup * inverse, q_ptr, qt_ptr, o_m, i_m, F + o_n, m_n, M, M_PADDED, W, M_PADDED, ROWS,
            TRANSPOSED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        bits = tl.maximum(bits, block_amax_bits(dup))
        if sums_ptr is not None:
            tl.store(sums_ptr + F + o, tl.sum(dup, axis=0), mask=m_n)
    return bits


@triton.jit(do_not_specialize=TOKENS)
def _activation_bwd_apply_kernel(
    dh_ptr, a_ptr, e_ptr, scale_ptr,  # (M, F), (M, W) FP8, (M, W / GROUP), ()
    q_ptr, qt_ptr, sums_ptr,  # (M, W) and (W, M_PADDED) FP8, (rows of tiles, W) FP32 partial sums
    exact_ptr, output_scale_ptr, h_ptr,  # (), (), (M, F) FP8; null unless in one read
    M, F, W, M_PADDED, tiles_n,
    KIND: tl.constexpr, INVERSE_MAX: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    bits = _bwd_tile(
        tl.program_id(0), dh_ptr, a_ptr, e_ptr, scale_ptr, q_ptr, qt_ptr, sums_ptr,
        output_scale_ptr, h_ptr, M, F, W, M_PADDED, tiles_n, KIND, ROWS, TRANSPOSED, GROUP,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if exact_ptr is not None:
        publish_scale(bits, exact_ptr, INVERSE_MAX)


@triton.jit(do_not_specialize=(*TOKENS, "tiles"))  # both depend on the number of tokens
def _activation_bwd_again_kernel(
    dh_ptr, a_ptr, e_ptr, guess_ptr, scale_ptr,  # (M, F), (M, W) FP8, (M, W / GROUP), (), ()
    q_ptr,  # (M, W) FP8
    M, F, W, tiles, tiles_n, KIND: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if _finish_guess(scale_ptr, guess_ptr):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _bwd_tile(
                tile, dh_ptr, a_ptr, e_ptr, scale_ptr, q_ptr, q_ptr, None, None, None, M, F, W, M,
                tiles_n, KIND, True, False, GROUP, BLOCK_M, BLOCK_N,
            )  # fmt: skip


def _shape(a: Tensor, kind: str) -> tuple[int, int, int]:
    """Return M, F and W of the activation's input."""
    M, W = a.shape
    return M, W // 2 if is_gated(kind) else W, W


def _launch_stats(
    a: Tensor,
    kind: str,
    scale: Tensor,
    fmt: str,
    saved: tuple[Tensor, Tensor] | None = None,
    h: Tensor | None = None,
    guess: Tensor | None = None,
) -> None:
    """Raise ``scale`` to h's, of a sample if nothing is saved; write h if there is a guess."""
    form = get_format(fmt)
    M, F, W = _shape(a, kind)
    every = SAMPLE_EVERY if saved is None else 1
    grid, options = tile_grid(cdiv(M, every), F, ROWS_TILE)
    q, exponents = (None, None) if saved is None else saved
    launch(
        _activation_stats_kernel, grid,
        a_ptr=a, q_ptr=q, e_ptr=exponents, scale_ptr=scale, guess_ptr=guess, h_ptr=h, M=M, F=F, W=W,
        KIND=ACTIVATIONS.index(kind), MAX_EXPONENT=form.max_exponent,
        INVERSE_MAX=(1.0 if every == 1 else MARGIN) / form.max,
        GROUP=1 if exponents is None else W // exponents.shape[1], EVERY=every, **options,
    )  # fmt: skip


@register(
    fake=lambda a, _kind, group_size, fmt: (
        *empty_grouped(a, group_size, fmt),
        a.new_empty((), dtype=torch.float32),
    ),
)
def _activation_stats(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, exponents = empty_grouped(a, group_size, fmt)
    scale = new_scale(a.device)
    _launch_stats(a, kind, scale, fmt, (q, exponents))
    return q, exponents, finish_scale(scale)


@register(
    fake=lambda a, kind, group_size, fmt: (
        *empty_grouped(a, group_size, fmt),
        a.new_empty((len(a), _shape(a, kind)[1]), dtype=get_format(fmt).dtype),
        a.new_empty((), dtype=torch.float32),
    ),
)
def _activation_once(
    a: Tensor, kind: str, group_size: int, fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, F, W = _shape(a, kind)
    q, exponents = empty_grouped(a, group_size, fmt)
    h = a.new_empty((M, F), dtype=get_format(fmt).dtype)
    guess, scale = new_scale(a.device), new_scale(a.device)
    _launch_stats(a, kind, guess, fmt)
    _launch_stats(a, kind, scale, fmt, (q, exponents), h, guess)
    (tiles,), options = tile_grid(M, F, ROWS_TILE)
    launch(
        _activation_again_kernel, (min(tiles, 8 * count_sms(a.device)),),
        a_ptr=a, scale_ptr=scale, guess_ptr=guess, q_ptr=h, M=M, F=F, W=W, tiles=tiles,
        KIND=ACTIVATIONS.index(kind), **options,
    )  # fmt: skip
    return q, exponents, h, scale


@register(
    fake=lambda a, kind, _scale, fmt: a.new_empty(
        (len(a), _shape(a, kind)[1]), dtype=get_format(fmt).dtype
    ),
)
def _activation_apply(a: Tensor, kind: str, scale: Tensor, fmt: str) -> Tensor:
    M, F, W = _shape(a, kind)
    q = a.new_empty((M, F), dtype=get_format(fmt).dtype)
    grid, options = tile_grid(M, F, ROWS_TILE)
    launch(
        _activation_apply_kernel, grid,
        a_ptr=a, scale_ptr=scale, q_ptr=q, M=M, F=F, W=W, KIND=ACTIVATIONS.index(kind), **options,
    )  # fmt: skip
    return q


def _recompute_tile(kind: str, group: int) -> Tile:
    columns = max(64, group)
    # The fastest of seven tiles on an H200: small for gated kinds, which need most registers.
    elements, warps = (2048, 4) if is_gated(kind) else (4096, 8)
    return Tile(elements // columns, columns, warps)


def _gradient_tile(kind: str, group: int) -> Tile:
    columns = max(64, group)
    # Gated kinds have two gradients and need the registers of twice as many warps.
    warps = NUM_WARPS if is_gated(kind) else NUM_WARPS // 2
    return Tile(GRADIENT_TILE // columns, columns, warps)


def _launch_bwd_stats(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, scale: Tensor, fmt: str,
    output_scale: Tensor | None = None, ht: Tensor | None = None, every: int = 1,
) -> None:  # fmt: skip
    """Raise ``scale`` to da's, or to a guess from a sample; write ht if it is given."""
    M, F, W = _shape(a, kind)
    group = W // exponents.shape[1]
    rows, tile = (M, ROWS_TILE) if ht is None else (pad_length(M), _recompute_tile(kind, group))
    grid, options = tile_grid(cdiv(rows, every), F, tile)
    launch(
        _activation_bwd_stats_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=scale, output_scale_ptr=output_scale,
        ht_ptr=ht, M=M, F=F, W=W, M_PADDED=pad_length(M), KIND=ACTIVATIONS.index(kind),
        INVERSE_MAX=(1.0 if every == 1 else MARGIN) / get_format(fmt).max, GROUP=group,
        EVERY=every, **options,
    )  # fmt: skip


@register(
    fake=lambda dh, a, _exponents, kind, output_scale, fmt, _: (
        dh.new_empty((), dtype=torch.float32),
        empty_layouts(len(a), _shape(a, kind)[1], a, fmt, False, output_scale is not None)[1],
    ),
)
def _activation_bwd_stats(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, F, _ = _shape(a, kind)
    _, ht = empty_layouts(M, F, dh, output_fmt, False, output_scale is not None)
    scale = new_scale(dh.device)
    written = None if output_scale is None else ht
    _launch_bwd_stats(dh, a, exponents, kind, scale, fmt, output_scale, written)
    return finish_scale(scale), ht


@register(
    fake=lambda dh, a, _exponents, _kind, output_scale, output_fmt, fmt: (
        a.new_empty(a.shape, dtype=get_format(fmt).dtype),
        dh.new_empty((), dtype=torch.float32),
        a.new_empty(0 if output_scale is None else dh.shape, dtype=get_format(output_fmt).dtype),
    ),
)
def _activation_bwd_once(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, output_scale: Tensor | None,
    output_fmt: str, fmt: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, F, W = _shape(a, kind)
    q, _ = empty_layouts(M, W, a, fmt, True, False)
    h, _ = empty_layouts(M, F, a, output_fmt, output_scale is not None, False)
    guess, scale = new_scale(a.device), new_scale(a.device)
    _launch_bwd_stats(dh, a, exponents, kind, guess, fmt, every=SAMPLE_EVERY)
    (tiles,), options = tile_grid(M, F, FROZEN_TILE)
    options |= {"KIND": ACTIVATIONS.index(kind), "GROUP": W // exponents.shape[1]}
    launch(
        _activation_bwd_apply_kernel, (tiles,),
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=guess, q_ptr=q, qt_ptr=q, sums_ptr=None,
        exact_ptr=scale, output_scale_ptr=output_scale, h_ptr=None if output_scale is None else h,
        M=M, F=F, W=W, M_PADDED=M, INVERSE_MAX=1.0 / get_format(fmt).max, ROWS=True,
        TRANSPOSED=False, **options,
    )  # fmt: skip
    launch(
        _activation_bwd_again_kernel, (min(tiles, 8 * count_sms(a.device)),),
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, guess_ptr=guess, scale_ptr=scale, q_ptr=q,
        M=M, F=F, W=W, tiles=tiles, **options,
    )  # fmt: skip
    return q, scale, h


@register(
    fake=lambda _, a, __, ___, *layout: allocate_gradient(len(a), a.shape[1], a, *layout[:-1]),
)
def _activation_bwd(
    dh: Tensor, a: Tensor, exponents: Tensor, kind: str, fmt: str, rows: bool, transposed: bool,
    bias: bool, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, F, W = _shape(a, kind)
    q, qt, sums = allocate_gradient(M, W, a, fmt, rows, transposed, bias)
    group = W // exponents.shape[1]
    grid, options = tile_grid(pad_length(M) if transposed else M, F, _gradient_tile(kind, group))
    partial = sums.new_empty((grid[0] // options["tiles_n"], W)) if bias else None
    launch(
        _activation_bwd_apply_kernel, grid,
        dh_ptr=dh, a_ptr=a, e_ptr=exponents, scale_ptr=scale, q_ptr=q, qt_ptr=qt,
        sums_ptr=partial, exact_ptr=None, output_scale_ptr=None, h_ptr=None, M=M, F=F, W=W,
        M_PADDED=pad_length(M), KIND=ACTIVATIONS.index(kind), INVERSE_MAX=1.0, ROWS=rows,
        TRANSPOSED=transposed, GROUP=group, **options,
    )  # fmt: skip
    return q, qt, sums if partial is None else partial.sum(0)


class ActivationSaved(NamedTuple):
    """Tensors that an activation saves for backward."""

    a: GroupScaled
    """The input, [M, W]."""
    scale: Tensor
    """Per-tensor scale of the output, FP32 []."""


def activation_fwd(
    a: Tensor, kind: str, *, group_size: int
) -> tuple[TensorScaled, ActivationSaved]:
    """Apply the activation and quantize the result per tensor to E4M3, [M, F].

    a is FP32, BF16 or FP16, contiguous: [M, 2F] = [gate | up] for gated kinds, else [M, F]. It is
    saved with ``group_size``, which divides F.
    """
    check_matrix("activation_fwd", "a", a)
    _check_kind(kind)
    if is_gated(kind) and a.shape[1] % 2:
        raise ValueError(f"{kind}: a has {a.shape[1]} columns; pass [gate | up], an even number")
    M, F, _ = _shape(a, kind)
    check_group("activation_fwd", F, group_size)
    # Processes that share scales must agree on their number, and M may differ.
    if M * F >= ONE_PASS and not are_shared():
        q, exponents, h, scale = _activation_once(a, kind, group_size, E4M3.name)
    else:
        q, exponents, scale = _activation_stats(a, kind, group_size, E4M3.name)
        h = _activation_apply(a, kind, scale, E4M3.name)
    return TensorScaled(h, scale), ActivationSaved(GroupScaled(q, exponents), scale)


def activation_bwd_stats(
    grad_output: Tensor, saved: ActivationSaved, kind: str
) -> tuple[Tensor, TensorScaled]:
    """Compute the gradient's scale and recompute the output, in one read of the operands.

    Returns the scale of :func:`activation_bwd`, FP32 [], for a contiguous gradient of h [M, F], and
    h in E4M3, recomputed from the saved input, transposed [F, M'].
    """
    _check("activation_bwd_stats", grad_output, saved, kind)
    scale, ht = _activation_bwd_stats(
        grad_output, saved.a.q, saved.a.exponents, kind, saved.scale, E4M3.name, E5M2.name
    )
    return scale, TensorScaled(ht, saved.scale)


def activation_bwd(
    grad_output: Tensor,
    saved: ActivationSaved,
    kind: str,
    *,
    rows: bool = True,
    transposed: bool = True,
    bias: bool = False,
    scale: Tensor | None = None,
) -> QuantizedGradient:
    """Compute the gradient of :func:`activation_fwd`'s input from the gradient of h [M, F].

    ``rows``, ``transposed`` and ``bias`` as in :func:`quantize_gradient`. ``scale`` is from
    :func:`activation_bwd_stats`; computed when absent.
    """
    _check("activation_bwd", grad_output, saved, kind)
    if scale is None:
        stats = _activation_bwd_stats(grad_output, *saved.a, kind, None, E5M2.name, E5M2.name)
        scale = cast(Tensor, stats[0])
    q, qt, sums = _activation_bwd(
        grad_output, *saved.a, kind, E5M2.name, rows, transposed, bias, scale
    )
    return to_quantized_gradient(q, qt, scale, sums, bias=bias)


def activation_bwd_once(
    grad_output: Tensor, saved: ActivationSaved, kind: str, *, recompute: bool
) -> tuple[TensorScaled, TensorScaled]:
    """Compute the gradient of the input and ``recompute`` the output in one read, row-major.

    Takes a contiguous gradient of h [M, F]. Returns the gradient in E5M2 [M, W], and h in E4M3
    [M, F], else empty. Not for processes that share scales: they would repeat it unequally.
    """
    _check("activation_bwd_once", grad_output, saved, kind)
    of_output = saved.scale if recompute else None
    q, scale, h = _activation_bwd_once(grad_output, *saved.a, kind, of_output, E4M3.name, E5M2.name)
    return TensorScaled(q, scale), TensorScaled(h, saved.scale)


def _check_kind(kind: str) -> None:
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")


def _check(op: str, grad_output: Tensor, saved: ActivationSaved, kind: str) -> None:
    _check_kind(kind)
    M, F, _ = _shape(saved.a.q, kind)
    check_matrix(op, "grad_output", grad_output, (M, F))
