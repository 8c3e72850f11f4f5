"""Gradient of RMSNorm and LayerNorm, from the FP8 copy that the forward pass kept.

    dx = rstd (g - avg(g) - xhat avg(g xhat)) + residual,   g = dy weight   (RMSNorm: no avg(g))
    dweight = sum over tokens of dy xhat,   dbias = sum over tokens of dy

One pass: programs walk over the rows, and sum the gradients of weight and bias for theirs in FP32;
their sums are added in a fixed order, so they are deterministic. The gradient of the residual path
is added on the way. Derivation: ``kernels/README.md``. Reference: ``reference.norm_bwd``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import check_like, check_matrix, check_vector
from coat_kernels.launch import COUNTS, TOKENS, launch
from coat_kernels.norm import NormSaved, load_row, row_programs
from coat_kernels.registry import register
from coat_kernels.tile import spread_exponents

REGISTERS = 128
"""Of a thread: 16 warps then share a multiprocessor."""


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_bwd_kernel(
    dy_ptr, x_ptr, e_ptr, weight_ptr, rstd_ptr, mean_ptr, residual_ptr,  # the last (M, N) or null
    dx_ptr, dweight_ptr, dbias_ptr,  # (M, N), (programs, N) FP32 partial sums
    M, N, programs,
    HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n[None, :] < N
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    o_g = tl.arange(0, GROUPS)
    o_1 = tl.arange(0, 1)
    weight = load_row(weight_ptr, tl.program_id(1), o_n, 1, N)
    dweight = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    dbias = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    row = tl.program_id(0)
    rows = tl.cdiv(M - row, programs)
    # All of the next row is on its way while one is worked on.
    next_dy = load_row(dy_ptr, row, o_n, M, N)
    next_x = load_row(x_ptr, row, o_n, M, N)
    next_e = load_row(e_ptr, row, o_g, M, N // GROUP)
    next_rstd = load_row(rstd_ptr, row, o_1, M, 1)
    if CENTERED:
        next_mean = load_row(mean_ptr, row, o_1, M, 1)
    if HAS_RESIDUAL:
        next_residual = load_row(residual_ptr, row, o_n, M, N)
    for i in range(rows):
        row = tl.program_id(0) + (i + 1) * programs
        o_m = (row - programs).to(tl.int64)
        dy = next_dy.to(tl.float32)
        next_dy = load_row(dy_ptr, row, o_n, M, N)
        x = spread_exponents(next_x.to(tl.float32), next_e, GROUP, 1, BLOCK_N)
        next_x = load_row(x_ptr, row, o_n, M, N)
        next_e = load_row(e_ptr, row, o_g, M, N // GROUP)
        rstd = next_rstd
        next_rstd = load_row(rstd_ptr, row, o_1, M, 1)
        if CENTERED:
            x -= next_mean
            next_mean = load_row(mean_ptr, row, o_1, M, 1)
        xhat = x * rstd  # beyond the last channel it need not be zero, but dy and g are
        g = dy * weight.to(tl.float32)
        if CENTERED:  # both sums at once: each costs the program a meeting of its warps
            projection, total = tl.split(tl.sum(tl.join(g * xhat, g), axis=1))
            dx = g - xhat * (projection / N)[:, None] - (total / N)[:, None]
            dbias += dy
        else:
            dx = g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None]
        dx *= rstd
        if HAS_RESIDUAL:
            dx += next_residual.to(tl.float32)
            next_residual = load_row(residual_ptr, row, o_n, M, N)
        tl.store(dx_ptr + o_m * N + o_n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=m_n)
        dweight += dy * xhat
    o = tl.program_id(0) * N + o_n[None, :]
    tl.store(dweight_ptr + o, dweight, mask=m_n)
    if CENTERED:
        tl.store(dbias_ptr + o, dbias, mask=m_n)


def _norm_bwd_triton(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    centered = mean.numel() > 0
    programs, options = row_programs(max(1, M), N, REGISTERS)  # none: writes zero sums
    dx = torch.empty_like(dy)
    sums = torch.empty((1 + centered, programs, N), dtype=torch.float32, device=dy.device)
    launch(
        _norm_bwd_kernel, (programs,),
        dy_ptr=dy, x_ptr=x, e_ptr=exponents, weight_ptr=weight, rstd_ptr=rstd, mean_ptr=mean,
        residual_ptr=residual, dx_ptr=dx, dweight_ptr=sums[0], dbias_ptr=sums[-1], M=M, N=N,
        programs=programs, HAS_RESIDUAL=residual is not None, CENTERED=centered,
        GROUP=N // exponents.shape[1], **options,
    )  # fmt: skip
    return dx, sums[0].sum(0), sums[1].sum(0) if centered else sums.new_empty(0)


def _norm_bwd_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    N, mean = dy.shape[1], rest[4]
    biases = N if mean.numel() else 0
    dweight, dbias = (dy.new_empty((size,), dtype=torch.float32) for size in (N, biases))
    return torch.empty_like(dy), dweight, dbias


_norm_bwd = register(
    "norm_bwd",
    triton=_norm_bwd_triton,
    reference=reference.norm_bwd,
    fake=_norm_bwd_fake,
)


def norm_bwd(
    dy: Tensor, saved: NormSaved, weight: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`norm_fwd`.

    Args:
        dy: gradient of the output [M, N], contiguous.
        saved: from the forward pass.
        weight: [N].
        residual: gradient that reaches the norm's input past the norm, like dy; added to dx.

    Returns:
        dx [M, N] in dy's dtype, dweight FP32 [N], dbias FP32 [N] (empty for RMSNorm).

    Raises:
        ValueError: dy is not a contiguous matrix of x's shape, residual is not like dy, or weight
            does not fit.
    """
    M, N = saved.x.q.shape
    check_matrix("norm_bwd", "dy", dy, (M, N))
    check_vector("norm_bwd", "weight", weight, N)
    if residual is not None:
        check_like("norm_bwd", "residual", residual, "dy", dy)
    return _norm_bwd(dy, saved.x.q, saved.x.exponents, weight, saved.rstd, saved.mean, residual)
