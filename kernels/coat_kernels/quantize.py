"""Quantize per tensor, row-major and transposed.

    scale = max(amax(x) / max, 2^-126),  q = cast(x / scale)

Formats and the convention: ``formats.py``. The reference: ``reference.py``. Reads x twice (amax,
then codes). Weights of layers with the same input are quantized as one matrix without being copied
together. Paper: arXiv 2410.19313, sections 4.1 (mixed granularity) and 4.2 (the amax of the first
pass can come from the producer: ``norm.py``, ``activation.py``).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import (
    E4M3,
    GEMM_MULTIPLE,
    MIN_SCALE,
    Format,
    TensorScaled,
    check_matrix,
    format_of,
    padded,
)
from coat_kernels.launch import (
    TILE,
    TOKENS,
    cdiv,
    launch,
    one_or_two_passes,
    tiled,
    transposing_tile,
)
from coat_kernels.registry import register
from coat_kernels.tile import (
    inverse_scale,
    load_tile,
    magnitude_bits,
    publish_scale,
    store_codes,
    word_offsets,
)

AMAX_ELEMENTS = 4096
"""Elements that a program of the pass for the largest magnitude reads at a time."""

AMAX_PROGRAMS = 1056
"""Most programs of that pass: eight per multiprocessor of an H200, each with many blocks."""


@triton.jit
def _amax_kernel(
    x_ptr, scale_ptr, numel,  # numel elements, ()
    INVERSE_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    x_ptr, scale_ptr,  # (M, N), ()
    q_ptr, qt_ptr,  # (M, N) in rows of stride_q, (N, M_END) in rows of stride_t
    sums_ptr,  # (rows of tiles, N) in rows of stride_q: FP32 partial sums over the tokens
    M, N, M_END, stride_q, stride_t, tiles_n,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes of one of the parts of a matrix; its place is in the pointers and strides."""
    pid = tl.program_id(0)  # tiles are counted along the row first
    i_m = pid // tiles_n
    o_m = word_offsets(i_m, BLOCK_M)
    o_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, o_m, o_n, (o_m[:, None] < M) & (o_n[None, :] < N), N)
    store_codes(
        x * inverse_scale(scale_ptr), q_ptr, qt_ptr, o_m, i_m, o_n, o_n < N, M, M_END, stride_q,
        stride_t, ROWS, TRANSPOSED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if SUMS:
        o_s = i_m.to(tl.int64) * stride_q + o_n
        tl.store(sums_ptr + o_s, tl.sum(x, axis=0), mask=o_n < N)


def empty_layouts(
    M: int, N: int, fmt: Format, rows: bool, transposed: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uninitialised codes [M, N] and [N, M']; a layout that is not asked for is empty."""
    q = torch.empty((M, N) if rows else (0,), dtype=fmt.dtype, device=device)
    qt = torch.empty((N, padded(M)) if transposed else (0,), dtype=fmt.dtype, device=device)
    return q, qt


def new_scale(device: torch.device) -> Tensor:
    """A scale [], FP32, that of zeros, for the programs of a launch to raise together.

    See :func:`coat_kernels.tile.publish_scale`.
    """
    return torch.full((), MIN_SCALE, dtype=torch.float32, device=device)


def tensor_scale_triton(parts: Sequence[Tensor], fmt: str) -> Tensor:
    """The scale of matrices that are quantized together."""
    grids = [min(AMAX_PROGRAMS, cdiv(part.numel(), AMAX_ELEMENTS)) for part in parts]
    scale = new_scale(parts[0].device)
    for part, grid in zip(parts, grids, strict=True):
        launch(
            _amax_kernel, (grid,),
            x_ptr=part, scale_ptr=scale, numel=part.numel(),
            INVERSE_MAX=1.0 / format_of(fmt).max, BLOCK=AMAX_ELEMENTS,
        )  # fmt: skip
    return scale


def _quantize_tensor_triton(
    parts: Sequence[Tensor], scale: Tensor, fmt: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    M, N = stacked_shape(parts)
    q, qt = empty_layouts(M, N, format_of(fmt), rows, transposed, parts[0].device)
    start = 0
    for i, part in enumerate(parts):
        m = part.shape[0]
        # The last part's programs write the padding, too.
        end = padded(M) - start if transposed and i == len(parts) - 1 else m
        grid, options = tiled(end, N, transposing_tile() if transposed else TILE)
        for in_rows, in_columns in one_or_two_passes(rows, transposed, N):
            launch(
                quantize_tensor_kernel, grid,
                x_ptr=part, scale_ptr=scale, q_ptr=q[start:] if rows and start else q,
                qt_ptr=qt[..., start:] if start else qt,
                sums_ptr=None, M=m, N=N, M_END=end, stride_q=N, stride_t=padded(M), ROWS=in_rows,
                TRANSPOSED=in_columns, SUMS=False, **options,
            )  # fmt: skip
        start += m
    return q, qt


def stacked_shape(parts: Sequence[Tensor]) -> tuple[int, int]:
    """[M, N] of matrices [m_i, N], one below the other."""
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


_tensor_scale = register(
    "tensor_scale",
    triton=tensor_scale_triton,
    reference=reference.tensor_scale,
    fake=lambda parts, _fmt: parts[0].new_empty((), dtype=torch.float32),
)
_quantize_tensor = register(
    "quantize_tensor",
    triton=_quantize_tensor_triton,
    reference=reference.quantize_tensor,
    fake=lambda parts, _scale, fmt, rows, transposed: empty_layouts(
        *stacked_shape(parts), format_of(fmt), rows, transposed, parts[0].device
    ),
)


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
    check_parts("quantize_layouts", parts, transposed)
    scale = _tensor_scale(parts, fmt.name)
    q, qt = _quantize_tensor(parts, scale, fmt.name, rows, transposed)
    return TensorScaled(q, scale), TensorScaled(qt, scale)


def quantize_transposed(parts: Sequence[Tensor], scale: Tensor, fmt: Format = E4M3) -> TensorScaled:
    """Quantize at a given scale, transposed only: [N, M']; see :func:`quantize_layouts`.

    Raises:
        ValueError: a part is not a contiguous matrix of a high-precision dtype, or their N differ.
    """
    check_parts("quantize_transposed", parts, True)
    return TensorScaled(_quantize_tensor(parts, scale, fmt.name, False, True)[1], scale)


def check_parts(op: str, parts: Sequence[Tensor], transposed: bool) -> None:
    """Refuse what does not stack to one matrix.

    Raises:
        ValueError: there is no part, one is not a contiguous matrix of a high-precision dtype, or
            dtypes or numbers of columns differ, or, to be transposed, one before the last has a
            number of rows that is not a multiple of 16.
    """
    for i, part in enumerate(parts):
        check_matrix(op, "x" if len(parts) == 1 else f"parts[{i}]", part)
    kinds = {(part.dtype, part.shape[1]) for part in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"{op}: got parts of (dtype, N) {sorted(map(str, kinds))}; give one or more matrices "
            "of the same dtype and the same number of columns"
        )
    rows = [part.shape[0] for part in parts]
    if transposed and any(m % GEMM_MULTIPLE for m in rows[:-1]):
        raise ValueError(
            f"{op}: parts of {rows} rows; to be transposed, all but the last need a multiple of "
            f"{GEMM_MULTIPLE}: quantize them apart"
        )
