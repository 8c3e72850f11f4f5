"""Per-tensor codes that exist already: transposed for a GEMM over tokens, or back as values.

    transpose_codes      q [M, N] -> [N, M'], tokens padded with zeros to a multiple of 16
    dequantize_tensor    x = q * scale

For what the forward pass keeps as the operand of a GEMM and the backward pass needs otherwise: the
input of a linear layer (its weight gradient) and attention's output. Bytes per element: 2; 1 and
those of the result. Reference: ``reference.transpose_codes``, ``dequantize_tensor``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import TensorScaled, check_codes, padded
from coat_kernels.launch import TOKENS, Tile, cdiv, launch, tiled
from coat_kernels.registry import register
from coat_kernels.tile import store_codes, word_offsets

TRANSPOSED_TILE = Tile(128, 128, 8)
"""Of codes that are transposed: the fastest of four on an H200."""

ELEMENTS = 4096
"""Elements per program where rows and columns do not matter."""


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


def _transpose_codes_triton(q: Tensor) -> Tensor:
    M, N = q.shape
    qt = q.new_empty((N, padded(M)))
    grid, options = tiled(padded(M), N, TRANSPOSED_TILE)
    launch(
        _transpose_codes_kernel, grid,
        q_ptr=q.view(torch.uint8), qt_ptr=qt.view(torch.uint8), M=M, N=N, M_PADDED=padded(M),
        **options,
    )  # fmt: skip
    return qt


def _dequantize_tensor_triton(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.empty(q.shape, dtype=dtype, device=q.device)
    launch(
        _dequantize_tensor_kernel, (cdiv(q.numel(), ELEMENTS),),
        q_ptr=q, scale_ptr=scale, x_ptr=x, numel=q.numel(), BLOCK=ELEMENTS,
    )  # fmt: skip
    return x


_transpose_codes = register(
    "transpose_codes",
    triton=_transpose_codes_triton,
    reference=reference.transpose_codes,
    fake=lambda q: q.new_empty((q.shape[1], padded(q.shape[0]))),
)
_dequantize_tensor = register(
    "dequantize_tensor",
    triton=_dequantize_tensor_triton,
    reference=reference.dequantize_tensor,
    fake=lambda q, _scale, dtype: q.new_empty(q.shape, dtype=dtype),
)


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
