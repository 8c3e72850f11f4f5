"""Quantization per tensor, row-major and transposed: activations, weights, gradients; and back.

    scale = max(amax(x) / max, 2^-126),  q = cast(x / scale)

    tensor_scale        scale of matrices that are quantized as one
    quantize_tensor     q [M, N] and [N, M'], for a GEMM over tokens; matrices one below the other
    quantize_gradient   both steps for matrices side by side; db = sum over tokens of dy
    transpose_codes     q [M, N] -> [N, M'], tokens padded with zeros to a multiple of 16
    dequantize_tensor   x = q * scale

x is read twice, for its amax and for its codes (the amax of the first pass can also come from the
producer: ``norm.py``, ``activation.py``). Matrices that are quantized with one scale are never
copied together, but read where they are, up to three in one launch: the weights of layers with the
same input, and the gradients of q, k and v as attention returns them. A linear layer's incoming
gradient dy goes to both of its GEMMs; the sums for the bias's gradient cost no third pass. They are
FP32 in a fixed order (partial sums per block of rows, then one sum), so they are deterministic.

What the forward pass saved as the operand of a GEMM is transposed in the backward pass: the input
of a linear layer for its weight gradient, attention's output; bytes per element: 2. Formats and the
convention: ``formats.py``. Reference: ``reference/quantize.py``. Paper: arXiv 2410.19313, sections
4.1 (mixed granularity) and 4.2.
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
    publish_scale,
    store_codes,
    word_offsets,
)
from coat_kernels.formats import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    Format,
    GradientCodes,
    TensorScaled,
    check_codes,
    check_matrix,
    format_of,
    padded,
)
from coat_kernels.launch import (
    TILE,
    TOKENS,
    Tile,
    cdiv,
    chosen,
    launch,
    one_or_two_passes,
    tiled,
    transposing_tile,
)
from coat_kernels.registry import register
from coat_kernels.scale_pool import new_scale

ELEMENTS = 4096
"""Elements that a program reads at a time where rows and columns do not matter."""

AMAX_PROGRAMS = 1056
"""Most programs that look for the largest magnitude: eight per multiprocessor of an H200, each with
many blocks."""

TRANSPOSED_TILE = Tile(128, 128, 8)
"""Of codes that are transposed: the fastest of four on an H200."""

MOST_PARTS = 3
"""So many matrices a launch takes: the weights of q, k and v. More take several launches."""

_MULTIPLE = tl.constexpr(GEMM_MULTIPLE)

_MANY = 2**31
"""Elements that a 32-bit number cannot count."""


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


@triton.jit(do_not_specialize=TOKENS)
def quantize_tensor_kernel(
    x0_ptr, x1_ptr, x2_ptr, scale_ptr,  # (M, N) or up to three parts of it, ()
    q_ptr, qt_ptr,  # (M, N), (N, M padded)
    sums_ptr,  # (rows of tiles, N): FP32 partial sums over the tokens
    M, N, before, size0, size1, size2,  # rows or columns before the parts, and of each
    tiles_n,
    SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes of a matrix, or of its parts: a program's second number is then that of its part.

    To be transposed, parts one below the other have a multiple of 16 rows, except for the last one.
    """
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    i_n = pid % tiles_n * BLOCK_N
    x_ptr, m, n = x0_ptr, M, N
    stride_t = tl.cdiv(M, _MULTIPLE) * _MULTIPLE
    if x1_ptr is not None:
        part = tl.program_id(1)
        start, size = before + tl.where(part == 0, 0, size0), size0
        if part == 1:
            x_ptr, size = x1_ptr, size1
        if x2_ptr is not None and part == 2:
            x_ptr, start, size = x2_ptr, start + size1, size2
        if (i_n if SIDE_BY_SIDE else i_m * BLOCK_M) >= size:
            return  # the grid is that of the largest part
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
    store_codes(
        x * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < n, m, m_end, N, stride_t,
        ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if SUMS:
        tl.store(sums_ptr + i_m.to(tl.int64) * N + o_n, tl.sum(x, axis=0), mask=o_n < n)


@triton.jit(do_not_specialize=TOKENS)
def _transpose_codes_kernel(
    q_ptr, qt_ptr,  # (M, N) and (N, M_PADDED) uint8
    M, N, M_PADDED, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (o_m[:, None] < M) & (o_n[None, :] < N)
    q = tl.load(q_ptr + o_m[:, None] * N + o_n[None, :], mask=mask, other=0)
    store_codes(
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
    """Uninitialised codes [M, N] and [N, M']; a layout that is not asked for is empty."""
    dtype = format_of(fmt).dtype
    q = torch.empty((M, N) if rows else (0,), dtype=dtype, device=like.device)
    qt = torch.empty((N, padded(M)) if transposed else (0,), dtype=dtype, device=like.device)
    return q, qt


def gradient_room(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised codes [M, N], [N, M'] and sums [N]; what is not wanted is empty."""
    q, qt = empty_layouts(M, N, like, fmt, rows, transposed)
    return q, qt, like.new_empty((N * bias,), dtype=torch.float32)


def empty_gradient(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with a scale [], third."""
    q, qt, sums = gradient_room(M, N, like, fmt, rows, transposed, bias)
    return q, qt, like.new_empty((), dtype=torch.float32), sums


def _launches(parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The parts of each launch: those that are not empty, not one alone if there are more."""
    filled = [part for part in parts if part.numel()]
    if len(filled) <= MOST_PARTS:
        return [filled] if filled else []
    number, count = cdiv(len(filled), MOST_PARTS), len(filled)
    return [filled[i * count // number : (i + 1) * count // number] for i in range(number)]


def _three(values: Sequence[Any]) -> Sequence[Any]:
    """A kernel's arguments for each of its parts; None for those that there are not."""
    return (*values, None, None, None)[:MOST_PARTS]


@register(
    fake=lambda parts, _fmt: parts[0].new_empty((), dtype=torch.float32),
)
def _tensor_scale(parts: Sequence[Tensor], fmt: str) -> Tensor:
    scale = new_scale(parts[0].device)
    launches = _launches(parts)
    if any(part.numel() >= _MANY for part in parts):
        # A launch's sizes are numbers of one type.
        launches = [[part] for part in parts if part.numel()]
    for together in launches:
        sizes = [part.numel() for part in together]
        programs = min(AMAX_PROGRAMS, cdiv(max(sizes), ELEMENTS))
        (x0, x1, x2), (numel0, numel1, numel2) = _three(together), _three(sizes)
        launch(
            _amax_kernel, (programs, len(together)),
            x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, scale_ptr=scale, numel0=numel0, numel1=numel1,
            numel2=numel2, INVERSE_MAX=1.0 / format_of(fmt).max, BLOCK=ELEMENTS,
        )  # fmt: skip
    return scale


def _write_codes(
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
    """Launch the kernel for parts of a matrix [M, N].

    Args:
        parts: [M, n_i] side by side, or [m_i, N] one below the other.
        scale: of all, FP32 [].
        q: [M, N], written if ``rows``.
        qt: [N, M'], written if ``transposed``.
        sums: FP32 [rows of tiles, N], the tiles' sums over the tokens; None if not wanted.
        side_by_side: whether they are.
        rows: write codes row-major.
        transposed: write them transposed.
    """
    sizes = [part.shape[side_by_side] for part in parts]
    whole = sum(sizes)
    M, N = (parts[0].shape[0], whole) if side_by_side else (whole, parts[0].shape[1])
    tile = transposing_tile() if transposed else TILE
    before = 0
    for together in _launches(parts):
        sizes = [part.shape[side_by_side] for part in together]
        m, n = (M, max(sizes)) if side_by_side else (max(sizes), N)
        grid, options = tiled(padded(m) if transposed else m, n, tile)
        one = len(together) == 1
        (x0, x1, x2), (size0, size1, size2) = _three(together), _three(() if one else sizes)
        for in_rows, in_columns in one_or_two_passes(rows, transposed, N):
            launch(
                quantize_tensor_kernel, (*grid, len(together)),
                x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, scale_ptr=scale, q_ptr=q, qt_ptr=qt,
                sums_ptr=sums, M=M, N=N, before=None if one else before,
                size0=size0, size1=size1, size2=size2, SIDE_BY_SIDE=side_by_side, ROWS=in_rows,
                TRANSPOSED=in_columns, SUMS=sums is not None, **options,
            )  # fmt: skip
        before += sum(sizes)


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
    _write_codes(parts, scale, q, qt, None, side_by_side=False, rows=rows, transposed=transposed)
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
    q, qt, sums = gradient_room(M, N, parts[0], fmt, rows, transposed, bias)
    scale = _tensor_scale.triton(parts, fmt)
    if not (rows or transposed or bias):
        return q, qt, scale, sums
    partial = None
    if bias:
        tile = chosen(transposing_tile() if transposed else TILE)
        tiles = cdiv(padded(M) if transposed else M, tile.rows)
        partial = sums.new_empty((tiles, N))
    _write_codes(parts, scale, q, qt, partial, side_by_side=True, rows=rows, transposed=transposed)
    return q, qt, scale, sums if partial is None else partial.sum(0)


@register(
    fake=lambda q: q.new_empty((q.shape[1], padded(q.shape[0]))),
)
def _transpose_codes(q: Tensor) -> Tensor:
    M, N = q.shape
    qt = q.new_empty((N, padded(M)))
    grid, options = tiled(padded(M), N, TRANSPOSED_TILE)
    launch(
        _transpose_codes_kernel, grid,
        q_ptr=q.view(torch.uint8), qt_ptr=qt.view(torch.uint8), M=M, N=N, M_PADDED=padded(M),
        **options,
    )  # fmt: skip
    return qt


@register(
    fake=lambda q, _scale, dtype: q.new_empty(q.shape, dtype=dtype),
)
def _dequantize_tensor(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch(
        _dequantize_tensor_kernel, (cdiv(q.numel(), ELEMENTS),),
        q_ptr=q, scale_ptr=scale, x_ptr=x, numel=q.numel(), BLOCK=ELEMENTS,
    )  # fmt: skip
    return x


def quantize_tensor(x: Tensor, fmt: Format = E4M3) -> TensorScaled:
    """Quantize with one scale.

    Args:
        x: FP32, BF16 or FP16 [M, N], contiguous.
        fmt: format of the codes.

    Raises:
        ValueError: x is not a contiguous matrix of such a dtype.
    """
    return quantize_layouts([x], fmt, rows=True, transposed=False)[0]


def quantize_layouts(
    parts: Sequence[Tensor], fmt: Format = E4M3, *, rows: bool, transposed: bool
) -> tuple[TensorScaled, TensorScaled]:
    """Quantize matrices that lie one below the other with one scale, in one or both layouts.

    Args:
        parts: FP32, BF16 or FP16 [m_i, N], contiguous; M is the sum of the m_i.
        fmt: format of the codes.
        rows: write codes [M, N].
        transposed: write codes [N, M'], M padded with zeros to a multiple of 16, so that they are
            an operand of a GEMM over tokens (the weight gradient).

    Returns:
        Both layouts; one that is not asked for is empty.

    Raises:
        ValueError: a part is not a contiguous matrix of such a dtype, or their N differ.
    """
    _check_parts("quantize_layouts", parts, transposed=transposed)
    scale = _tensor_scale(parts, fmt.name)
    q, qt = _quantize_tensor(parts, scale, fmt.name, rows, transposed)
    return TensorScaled(q, scale), TensorScaled(qt, scale)


def quantize_transposed(parts: Sequence[Tensor], scale: Tensor, fmt: Format = E4M3) -> TensorScaled:
    """Quantize at a given scale, transposed only: [N, M']; see :func:`quantize_layouts`.

    Raises:
        ValueError: a part is not a contiguous matrix of a high-precision dtype, or their N differ.
    """
    _check_parts("quantize_transposed", parts, transposed=True)
    return TensorScaled(_quantize_tensor(parts, scale, fmt.name, False, True)[1], scale)


def quantize_gradient(
    parts: Sequence[Tensor],
    fmt: Format = E5M2,
    *,
    rows: bool = True,
    transposed: bool = True,
    bias: bool = False,
) -> GradientCodes:
    """Quantize matrices that lie side by side with one scale.

    Args:
        parts: FP32, BF16 or FP16 [M, n_i], contiguous; N is the sum of the n_i, which are multiples
            of 16 if there is more than one.
        fmt: format of the codes.
        rows: write codes [M, N], for the input gradient.
        transposed: write codes [N, M'], for the weight gradient: M padded with zeros to a multiple
            of 16.
        bias: sum over the tokens, FP32 [N].

    Raises:
        ValueError: a part is not a contiguous matrix of such a dtype, or they do not fit together.
    """
    _check_parts("quantize_gradient", parts, side_by_side=True)
    return as_codes(*_quantize_gradient(parts, fmt.name, rows, transposed, bias), bias=bias)


def as_codes(q: Tensor, qt: Tensor, scale: Tensor, sums: Tensor, *, bias: bool) -> GradientCodes:
    """What :func:`empty_gradient` made room for, with its names."""
    return GradientCodes(TensorScaled(q, scale), TensorScaled(qt, scale), sums if bias else None)


def transpose_codes(x: TensorScaled) -> TensorScaled:
    """Codes [M, N] as [N, M'], M padded with zeros to a multiple of 16.

    Raises:
        ValueError: the codes are not a contiguous FP8 matrix.
    """
    check_codes("transpose_codes", "x", x.q)
    return TensorScaled(_transpose_codes(x.q), x.scale)


def dequantize_tensor(x: TensorScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of per-tensor codes [M, N], in ``dtype``: FP32, BF16 or FP16.

    Raises:
        ValueError: the codes are not a contiguous FP8 matrix.
    """
    check_codes("dequantize_tensor", "x", x.q)
    return _dequantize_tensor(x.q, x.scale, dtype)


def _check_parts(
    op: str, parts: Sequence[Tensor], *, side_by_side: bool = False, transposed: bool = False
) -> None:
    """Refuse what does not make one matrix.

    Raises:
        ValueError: there is no part, one is not a contiguous matrix of a high-precision dtype, or
            dtypes or the sizes that must be equal differ; or, of several, those side by side, or
            all but the last of those to be transposed, are no multiple of 16 wide or high.
    """
    name = "dy" if side_by_side else "x"
    for i, part in enumerate(parts):
        check_matrix(op, name if len(parts) == 1 else f"parts[{i}]", part)
    letter, equal, other = ("M", "rows", "columns") if side_by_side else ("N", "columns", "rows")
    kinds = {(part.dtype, part.shape[not side_by_side]) for part in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"{op}: got parts of (dtype, {letter}) {sorted(map(str, kinds))}; give one or more "
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
