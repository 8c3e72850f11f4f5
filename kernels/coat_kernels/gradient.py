"""A linear layer's incoming gradient, quantized for both of its GEMMs, with the bias's gradient.

    scale = max(amax(dy) / max, 2^-126),   q = cast(dy / scale),   db = sum over tokens of dy

dy may lie in several matrices side by side (the gradients of q, k and v, as attention returns
them): they are read where they are, up to three in one launch, and never copied together. dy is
read twice, for its amax and for its codes; the sums of the second pass cost no third. db is summed
in FP32 in a fixed order (partial sums per block of rows, then one sum), so it is deterministic.
Kernels: ``quantize.py``. Reference: ``reference.quantize_gradient``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import (
    E5M2,
    Format,
    GradientCodes,
    TensorScaled,
    check_matrix,
    format_of,
    padded,
)
from coat_kernels.launch import TILE, cdiv, chosen, transposing_tile
from coat_kernels.quantize import empty_layouts, tensor_scale_triton, write_codes
from coat_kernels.registry import register


def gradient_room(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised codes [M, N], [N, M'] and sums [N]; what is not wanted is empty."""
    q, qt = empty_layouts(M, N, format_of(fmt), rows, transposed, like.device)
    return q, qt, like.new_empty((N * bias,), dtype=torch.float32)


def empty_gradient(
    M: int, N: int, like: Tensor, fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with a scale [], third."""
    q, qt, sums = gradient_room(M, N, like, fmt, rows, transposed, bias)
    return q, qt, like.new_empty((), dtype=torch.float32), sums


def as_codes(results: tuple[Tensor, Tensor, Tensor, Tensor], bias: bool) -> GradientCodes:
    """What :func:`empty_gradient` made room for, with its names."""
    q, qt, scale, sums = results
    return GradientCodes(TensorScaled(q, scale), TensorScaled(qt, scale), sums if bias else None)


def _empty_gradient(parts: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = sum(part.shape[1] for part in parts)
    return empty_gradient(parts[0].shape[0], columns, parts[0], *rest)


def _quantize_gradient_triton(
    parts: Sequence[Tensor], fmt: str, rows: bool, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, N = parts[0].shape[0], sum(part.shape[1] for part in parts)
    q, qt, sums = gradient_room(M, N, parts[0], fmt, rows, transposed, bias)
    scale = tensor_scale_triton(parts, fmt)
    if not (rows or transposed or bias):
        return q, qt, scale, sums
    partial = None
    if bias:
        tile = chosen(transposing_tile() if transposed else TILE)
        tiles = cdiv(padded(M) if transposed else M, tile.rows)
        partial = sums.new_empty((tiles, N))
    write_codes(parts, scale, q, qt, partial, side_by_side=True, rows=rows, transposed=transposed)
    return q, qt, scale, sums if partial is None else partial.sum(0)


_quantize_gradient = register(
    "quantize_gradient",
    triton=_quantize_gradient_triton,
    reference=reference.quantize_gradient,
    fake=_empty_gradient,
)


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
    check_side_by_side("quantize_gradient", parts)
    return as_codes(_quantize_gradient(parts, fmt.name, rows, transposed, bias), bias)


def check_side_by_side(op: str, parts: Sequence[Tensor]) -> None:
    """Refuse what does not make one matrix.

    Raises:
        ValueError: there is no part, one is not a contiguous matrix of a high-precision dtype,
            dtypes or numbers of rows differ, or one of several has a number of columns that is not
            a multiple of 16.
    """
    for i, part in enumerate(parts):
        check_matrix(op, "dy" if len(parts) == 1 else f"parts[{i}]", part)
    kinds = {(part.dtype, part.shape[0]) for part in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"{op}: got parts of (dtype, M) {sorted(map(str, kinds))}; give one or more matrices "
            "of the same dtype and the same number of rows"
        )
    columns = [part.shape[1] for part in parts]
    if len(parts) > 1 and any(n % 16 for n in columns):
        raise ValueError(f"{op}: got parts of {columns} columns; each needs a multiple of 16")
