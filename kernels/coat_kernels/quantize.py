"""Per-tensor quantization and dequantization, row-major and transposed.

    scale = max(amax(x) / max, 2^-126),  q = cast(x / scale)

    tensor_scale         one scale for up to three matrices
    dither_scale         the scale of weights, times a factor in [1, 2) that changes with them
    quantize_tensor      q [M, N] and [N, M'], for a GEMM over tokens; matrices concatenated by rows
    quantize_gradient    both steps for matrices concatenated by columns; db = sum over tokens of dy
    transpose_quantized  q [M, N] -> [N, M'], tokens padded with zeros to a multiple of 16
    dequantize_tensor    x = q * scale

x is read twice, for its amax and for its FP8 data. Matrices with one scale are never concatenated
in memory: one launch reads up to three of them. The sums for the bias gradient are FP32 sums in a
fixed order (partial sums per block of rows, then one sum), so they are deterministic.

Between two steps of fine-tuning, weights hardly change, so with the scale of their amax they have
the same rounding errors in every step, and the model learns to compensate them. The factor moves
the grid of the rounded values, so that the errors differ and cancel over the steps. It is a hash of
the weights' bits: equal for all uses in a step, for all ranks and after a resume.

Formats and the scale convention: ``formats.py``. Reference: ``reference/quantize.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels.device import (
    inverse_scale,
    load_tile,
    magnitude_bits,
    mix_bits,
    publish_scale,
    store_quantized,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    Format,
    QuantizedGradient,
    TensorScaled,
    check_matrix,
    check_quantized,
    get_format,
    pad_length,
)
from coat_kernels.launch import (
    TILE,
    TOKENS,
    Tile,
    cdiv,
    count_sms,
    launch,
    plan_passes,
    tile_grid,
    transposing_tile,
)
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale
from coat_kernels.shared_scales import finish_scale

ELEMENTS = 4096
"""Elements per read in kernels that ignore rows and columns."""

TRANSPOSED_TILE = Tile(128, 128, 8)
"""Tile of ``transpose_quantized``: the fastest of four on an H200."""

MAX_PARTS = 3
"""Maximum number of matrices of one launch: the weights, or the adapters, of q, k and v."""

_MULTIPLE = tl.constexpr(GEMM_MULTIPLE)

_MANY = 2**31
"""Smallest number of elements that exceeds a signed 32-bit integer."""


@triton.jit
def _amax_kernel(
    x0_ptr, x1_ptr, x2_ptr, scale_ptr,  # numel0, numel1 and numel2 elements, ()
    numel0, numel1, numel2,
    INVERSE_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, numel = x0_ptr, numel0
    if x1_ptr is not None and tl.program_id(1) == 1:
        x_ptr, numel = x1_ptr, numel1
    if x2_ptr is not None and tl.program_id(1) == 2:
        x_ptr, numel = x2_ptr, numel2
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(tl.cdiv(numel, step)):
        o = start + i * step + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + o, mask=o < numel, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x))
    publish_scale(tl.max(bits, axis=0), scale_ptr, INVERSE_MAX)


@triton.jit
def _dither_kernel(
    scale_ptr, x_ptr, dithered_ptr, numel, step, BLOCK: tl.constexpr  # (), numel elements, ()
):  # fmt: skip
    o = tl.arange(0, BLOCK).to(tl.int64) * step
    x = tl.load(x_ptr + o, mask=o < numel, other=0.0).to(tl.float32)
    total = tl.sum(x.to(tl.uint32, bitcast=True), axis=0).to(tl.uint32)  # modulo 2^32
    fraction = (mix_bits(total) >> 8).to(tl.float32) * 2.0**-24
    tl.store(dithered_ptr, tl.load(scale_ptr) * (1.0 + fraction))


@triton.jit(do_not_specialize=TOKENS)
def quantize_tensor_kernel(
    x0_ptr, x1_ptr, x2_ptr, scale_ptr,  # (M, N) or up to three parts of it, ()
    q_ptr, qt_ptr,  # (M, N), (N, M padded)
    sums_ptr,  # (rows of tiles, N): FP32 partial sums over the tokens
    M, N, size0, size1, size2,  # the last three: rows or columns of each part
    tiles_n,
    SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix, or its parts, numbered by the second program id.

    For transposed output, parts concatenated by rows have a multiple of 16 rows, except the last.
    """
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    i_n = pid % tiles_n * BLOCK_N
    x_ptr, m, n = x0_ptr, M, N
    stride_t = tl.cdiv(M, _MULTIPLE) * _MULTIPLE
    if x1_ptr is not None:
        part = tl.program_id(1)
        start, size = tl.where(part == 0, 0, size0), size0
        if part == 1:
            x_ptr, size = x1_ptr, size1
        if x2_ptr is not None and part == 2:
            x_ptr, start, size = x2_ptr, start + size1, size2
        if (i_n if SIDE_BY_SIDE else i_m * BLOCK_M) >= size:
            return  # the grid covers the largest part
        if SIDE_BY_SIDE:
            n = size
            q_ptr += start
            qt_ptr += start.to(tl.int64) * stride_t
            if SUMS:
                sums_ptr += start
        else:
            m = size
            q_ptr += start.to(tl.int64) * N
            qt_ptr += start
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = i_n + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, o_m, o_n, (o_m[:, None] < m) & (o_n[None, :] < n), n)
    m_end = tl.cdiv(m, _MULTIPLE) * _MULTIPLE
    store_quantized(
        x * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < n, m, m_end, N, stride_t,
        ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if SUMS:
        tl.store(sums_ptr + i_m.to(tl.int64) * N + o_n, tl.sum(x, axis=0), mask=o_n < n)


@triton.jit(do_not_specialize=TOKENS)
def _transpose_quantized_kernel(
    q_ptr, qt_ptr,  # matrices (M, N) and (N, M_PADDED) uint8, numbered by the second program id
    M, N, M_PADDED, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    q_ptr += tl.program_id(1).to(tl.int64) * M * N
    qt_ptr += tl.program_id(1).to(tl.int64) * N * M_PADDED
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (o_m[:, None] < M) & (o_n[None, :] < N)
    q = tl.load(q_ptr + o_m[:, None] * N + o_n[None, :], mask=mask, other=0)
    store_quantized(
        q, q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_PADDED, N, M_PADDED, False, True, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip


@triton.jit
def _dequantize_tensor_kernel(q_ptr, scale_ptr, x_ptr, numel, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + o, mask=o < numel, other=0.0).to(tl.float32)
    x = q * tl.load(scale_ptr)
    tl.store(x_ptr + o, x.to(x_ptr.dtype.element_ty), mask=o < numel)


def empty_layouts(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Allocate FP8 tensors [M, N] and [N, M']; a layout that is not requested is empty."""
    dtype = get_format(fmt).dtype
    q = torch.empty((M, N) if rows else (0,), dtype=dtype, device=like.device)
    qt = torch.empty((N, pad_length(M)) if transposed else (0,), dtype=dtype, device=like.device)
    return q, qt


def allocate_gradient(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate FP8 tensors [M, N], [N, M'] and sums [N]; those not requested are empty."""
    q, qt = empty_layouts(M, N, like, fmt, rows, transposed)
    return q, qt, like.new_empty((N * bias,), dtype=torch.float32)


def empty_gradient(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the same tensors and, third, a scale []."""
    q, qt, sums = allocate_gradient(M, N, like, fmt, rows, transposed, bias)
    return q, qt, like.new_empty((), dtype=torch.float32), sums


def pad_to_three(values: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments for three parts; None for an absent part."""
    return (*values, None, None, None)[:MAX_PARTS]


@register(fake=lambda parts, *_: parts[0].new_empty((), dtype=torch.float32))
def _tensor_scale(parts: Sequence[Tensor], fmt: str, shared: bool = True) -> Tensor:
    scale = new_scale(parts[0].device)
    filled = [part for part in parts if part.numel()]
    # The sizes of a launch must have the same integer type.
    apart = len(filled) < 2 or any(part.numel() >= _MANY for part in filled)
    for together in [[part] for part in filled] if apart else [filled]:
        sizes = [part.numel() for part in together]
        programs = min(8 * count_sms(scale.device), cdiv(max(sizes), ELEMENTS))
        (x0, x1, x2), (numel0, numel1, numel2) = pad_to_three(together), pad_to_three(sizes)
        launch(
            _amax_kernel, (programs, len(together)),
            x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, scale_ptr=scale, numel0=numel0, numel1=numel1,
            numel2=numel2, INVERSE_MAX=1.0 / get_format(fmt).max, BLOCK=ELEMENTS,
        )  # fmt: skip
    return finish_scale(scale) if shared else scale


@register(fake=lambda scale, _weight: scale.new_empty(()))
def _dither_scale(scale: Tensor, weight: Tensor) -> Tensor:
    dithered = torch.empty_like(scale)
    launch(
        _dither_kernel, (1,),
        scale_ptr=scale, x_ptr=weight, dithered_ptr=dithered, numel=weight.numel(),
        step=max(1, weight.numel() // ELEMENTS), BLOCK=ELEMENTS,
    )  # fmt: skip
    return dithered


def _write_quantized(
    parts: Sequence[Tensor],
    scale: Tensor,
    q: Tensor,
    qt: Tensor,
    sums: Tensor | None,
    *,
    side_by_side: bool,
    rows: bool,
    transposed: bool,
) -> None:
    """Launch the kernel for parts [m_i, N] of a matrix [M, N], or [M, n_i] if ``side_by_side``.

    Writes q [M, N] if ``rows``, qt [N, M'] if ``transposed``, and the tiles' sums over the tokens,
    FP32 [rows of tiles, N], if they are not None.
    """
    sizes = [part.shape[side_by_side] for part in parts]
    whole = sum(sizes)
    M, N = (parts[0].shape[0], whole) if side_by_side else (whole, parts[0].shape[1])
    tile = transposing_tile() if transposed else TILE
    filled = [part for part in parts if part.numel()]
    if not filled:
        return
    sizes = [part.shape[side_by_side] for part in filled]
    m, n = (M, max(sizes)) if side_by_side else (max(sizes), N)
    grid, options = tile_grid(pad_length(m) if transposed else m, n, tile)
    x0, x1, x2 = pad_to_three(filled)
    size0, size1, size2 = pad_to_three(sizes if len(filled) > 1 else ())
    for in_rows, in_columns in plan_passes(rows, transposed, N):
        launch(
            quantize_tensor_kernel, (*grid, len(filled)),
            x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, scale_ptr=scale, q_ptr=q, qt_ptr=qt, sums_ptr=sums,
            M=M, N=N, size0=size0, size1=size1, size2=size2, SIDE_BY_SIDE=side_by_side,
            ROWS=in_rows, TRANSPOSED=in_columns, SUMS=sums is not None, **options,
        )  # fmt: skip


@register(
    fake=lambda parts, _scale, *layout: empty_layouts(
        sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0], *layout
    ),
)
def _quantize_tensor(
    parts: Sequence[Tensor], scale: Tensor, fmt: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    M, N = sum(part.shape[0] for part in parts), parts[0].shape[1]
    q, qt = empty_layouts(M, N, parts[0], fmt, rows, transposed)
    _write_quantized(
        parts, scale, q, qt, None, side_by_side=False, rows=rows, transposed=transposed
    )
    return q, qt


@register(
    fake=lambda parts, *rest: empty_gradient(
        parts[0].shape[0], sum(part.shape[1] for part in parts), parts[0], *rest
    ),
)
def _quantize_gradient(
    parts: Sequence[Tensor], fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, N = parts[0].shape[0], sum(part.shape[1] for part in parts)
    q, qt, sums = allocate_gradient(M, N, parts[0], fmt, rows, transposed, bias)
    scale = _tensor_scale.triton(parts, fmt)
    if not (rows or transposed or bias):
        return q, qt, scale, sums
    partial = None
    if bias:
        tile = transposing_tile() if transposed else TILE
        tiles = cdiv(pad_length(M) if transposed else M, tile.rows)
        partial = sums.new_empty((tiles, N))
    _write_quantized(
        parts, scale, q, qt, partial, side_by_side=True, rows=rows, transposed=transposed
    )
    return q, qt, scale, sums if partial is None else partial.sum(0)


@register(fake=lambda q: q.new_empty((*q.shape[:-2], q.shape[-1], pad_length(q.shape[-2]))))
def _transpose_quantized(q: Tensor) -> Tensor:
    *matrices, M, N = q.shape
    qt = q.new_empty((*matrices, N, pad_length(M)))
    grid, options = tile_grid(pad_length(M), N, TRANSPOSED_TILE)
    launch(
        _transpose_quantized_kernel, (*grid, *(matrices or [1])),
        q_ptr=q.view(torch.uint8), qt_ptr=qt.view(torch.uint8), M=M, N=N, M_PADDED=pad_length(M),
        **options,
    )  # fmt: skip
    return qt


@register(fake=lambda q, _scale, dtype: q.new_empty(q.shape, dtype=dtype))
def _dequantize_tensor(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch(
        _dequantize_tensor_kernel, (cdiv(q.numel(), ELEMENTS),),
        q_ptr=q, scale_ptr=scale, x_ptr=x, numel=q.numel(), BLOCK=ELEMENTS,
    )  # fmt: skip
    return x


def tensor_scale(parts: Sequence[Tensor], fmt: Format) -> Tensor:
    """Compute one scale of up to three tensors, FP32 []; every process has its own."""
    return _tensor_scale(parts, fmt.name, False)


def quantize_tensor(x: Tensor, fmt: Format = E4M3) -> TensorScaled:
    """Quantize x [M, N] (FP32, BF16 or FP16, contiguous) with one scale."""
    return quantize_layouts([x], fmt, rows=True, transposed=False, shared=True)[0]


def quantize_layouts(
    parts: Sequence[Tensor],
    fmt: Format = E4M3,
    *,
    rows: bool,
    transposed: bool,
    shared: bool = False,
    dithered: bool = False,
) -> tuple[TensorScaled, TensorScaled]:
    """Quantize FP32, BF16 or FP16 matrices [m_i, N], concatenated by rows, with one scale.

    Returns FP8 data [M, N] if ``rows``, and [N, M'] if ``transposed``, M padded with zeros to a
    multiple of 16; otherwise empty. ``shared``: :func:`share_scales` applies, unlike for weights.
    ``dithered``: the scale comes from ``dither_scale``, as for weights.
    """
    _check_parts("quantize_layouts", parts, transposed=transposed)
    scale = _tensor_scale(parts, fmt.name, shared)
    if dithered:
        scale = _dither_scale(scale, parts[0])
    q, qt = _quantize_tensor(parts, scale, fmt.name, rows, transposed)
    return TensorScaled(q, scale), TensorScaled(qt, scale)


def quantize_again(
    parts: Sequence[Tensor], scale: Tensor, fmt: Format = E4M3, *, transposed: bool
) -> TensorScaled:
    """Quantize with a scale from before to [M, N] or [N, M']; see :func:`quantize_layouts`."""
    _check_parts("quantize_again", parts, transposed=transposed)
    made = _quantize_tensor(parts, scale, fmt.name, not transposed, transposed)
    return TensorScaled(made[transposed], scale)


def quantize_gradient(
    parts: Sequence[Tensor],
    fmt: Format = E5M2,
    *,
    rows: bool = True,
    transposed: bool = True,
    bias: bool = False,
) -> QuantizedGradient:
    """Quantize FP32, BF16 or FP16 matrices [M, n_i], concatenated by columns, with one scale.

    The n_i are multiples of 16 if there is more than one. Writes FP8 data [M, N] if ``rows``, for
    the grad-input GEMM, and [N, M'] if ``transposed``, for the grad-weight GEMM; computes the sum
    over the tokens, FP32 [N], if ``bias``.
    """
    _check_parts("quantize_gradient", parts, side_by_side=True)
    return to_quantized_gradient(
        *_quantize_gradient(parts, fmt.name, rows, transposed, bias), bias=bias
    )


def to_quantized_gradient(
    q: Tensor, qt: Tensor, scale: Tensor, sums: Tensor, *, bias: bool
) -> QuantizedGradient:
    """Wrap the tensors of :func:`empty_gradient`."""
    return QuantizedGradient(
        TensorScaled(q, scale), TensorScaled(qt, scale), sums if bias else None
    )


def transpose_quantized(x: TensorScaled) -> TensorScaled:
    """Transpose FP8 data [..., M, N] to [..., N, M'], M padded with zeros to a multiple of 16."""
    check_quantized("transpose_quantized", "x", x.q.flatten(0, -2))
    return TensorScaled(_transpose_quantized(x.q), x.scale)


def dequantize_tensor(x: TensorScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a per-tensor scaled matrix [M, N] to ``dtype``: FP32, BF16 or FP16."""
    check_quantized("dequantize_tensor", "x", x.q)
    return _dequantize_tensor(x.q, x.scale, dtype)


def _check_parts(
    op: str, parts: Sequence[Tensor], *, side_by_side: bool = False, transposed: bool = False
) -> None:
    """Check that parts can be concatenated: one to three contiguous matrices of one dtype."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{op}: got {len(parts)} parts; pass at most {MAX_PARTS}")
    name = "dy" if side_by_side else "x"
    for i, part in enumerate(parts):
        check_matrix(op, name if len(parts) == 1 else f"parts[{i}]", part)
    letter, equal, other = ("M", "rows", "columns") if side_by_side else ("N", "columns", "rows")
    types = {(part.dtype, part.shape[not side_by_side]) for part in parts}
    if len(types) != 1:
        raise ValueError(
            f"{op}: got parts of (dtype, {letter}) {sorted(map(str, types))}; pass one or more "
            f"matrices of the same dtype and the same number of {equal}"
        )
    sizes = [part.shape[side_by_side] for part in parts]
    if side_by_side:
        aligned, which = sizes if len(sizes) > 1 else [], "each needs"
    else:
        aligned, which = sizes[:-1] if transposed else [], "to be transposed, all but the last need"
    if any(size % GEMM_MULTIPLE for size in aligned):
        raise ValueError(
            f"{op}: got parts of {sizes} {other}; {which} a multiple of {GEMM_MULTIPLE}: quantize "
            "them apart"
        )
