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
from coat_kernels.norm import NormSaved
from coat_kernels.registry import register
from coat_kernels.tile import spread_exponents
from coat_kernels.walk import load_channels, load_row, row_sum, store_row, walked


@triton.jit
def _load_piece(
    dy_ptr, x_ptr, e_ptr, row, i_n, M, N, GROUP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A piece of a row: the output's gradient, x's codes and their exponents, as stored."""
    o_n = i_n + tl.arange(0, WIDTH)
    o_g = i_n // GROUP + tl.arange(0, WIDTH // GROUP)
    e = load_row(e_ptr, row, o_g, M, N // GROUP)
    return load_row(dy_ptr, row, o_n, M, N), load_row(x_ptr, row, o_n, M, N), e


@triton.jit
def _normalized(q, e, rstd, mean, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """xhat; beyond the last channel it need not be zero, but dy is."""
    return (spread_exponents(q.to(tl.float32), e, GROUP, 1, WIDTH) - mean) * rstd


@triton.jit
def _averages(g, xhat, N, CENTERED: tl.constexpr):
    """avg(g xhat) and, both at once, avg(g): each sum costs the program a meeting of its warps."""
    if CENTERED:
        projection, total = tl.split(tl.sum(tl.join(g * xhat, g), axis=1))
        return tl.sum(projection, axis=0) / N, tl.sum(total, axis=0) / N
    else:
        return row_sum(g * xhat) / N, 0.0


@triton.jit
def _store_gradient(
    g, xhat, projection, total, rstd, residual, dx_ptr, row, o_n, N,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    dx = (g - xhat * projection - total) * rstd
    if HAS_RESIDUAL:
        dx += residual.to(tl.float32)
    store_row(dx, dx_ptr, row, o_n, N)


@triton.jit(do_not_specialize=(*TOKENS, *COUNTS))
def _norm_bwd_kernel(  # noqa: C901 - the branches are those of the compiler
    dy_ptr, x_ptr, e_ptr, weight_ptr, rstd_ptr, mean_ptr, residual_ptr,  # the last (M, N) or null
    dx_ptr, dweight_ptr, dbias_ptr,  # (M, N), (programs, N) FP32 partial sums
    M, N, programs,
    HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_h = tl.arange(0, HEAD)
    weight_h = load_channels(weight_ptr, o_h, N)
    dweight_h = tl.zeros((1, HEAD), dtype=tl.float32)
    dbias_h = tl.zeros((1, HEAD), dtype=tl.float32)
    next_dy_h, next_q_h, next_e_h = _load_piece(dy_ptr, x_ptr, e_ptr, row, 0, M, N, GROUP, HEAD)
    if TAIL:
        o_t = HEAD + tl.arange(0, TAIL)
        weight_t = load_channels(weight_ptr, o_t, N)
        dweight_t = tl.zeros((1, TAIL), dtype=tl.float32)
        dbias_t = tl.zeros((1, TAIL), dtype=tl.float32)
        next_dy_t, next_q_t, next_e_t = _load_piece(
            dy_ptr, x_ptr, e_ptr, row, HEAD, M, N, GROUP, TAIL
        )
    next_rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    next_mean = 0.0
    if CENTERED:
        next_mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
    # The next residual of a row in two pieces is read when it is used, not ahead.
    AHEAD: tl.constexpr = HAS_RESIDUAL and not TAIL
    if AHEAD:
        next_residual = load_row(residual_ptr, row, o_h, M, N)
    for i in range(tl.cdiv(M - row, programs)):
        # The next row is on its way while this one is worked on.
        row = tl.program_id(0) + i * programs
        after = row + programs
        rstd = next_rstd
        mean = next_mean
        next_rstd = tl.load(rstd_ptr + after, mask=after < M, other=0.0)
        if CENTERED:
            next_mean = tl.load(mean_ptr + after, mask=after < M, other=0.0)
        dy_h = next_dy_h.to(tl.float32)
        xhat_h = _normalized(next_q_h, next_e_h, rstd, mean, GROUP, HEAD)
        next_dy_h, next_q_h, next_e_h = _load_piece(
            dy_ptr, x_ptr, e_ptr, after, 0, M, N, GROUP, HEAD
        )
        g_h = dy_h * weight_h.to(tl.float32)
        projection, total = _averages(g_h, xhat_h, N, CENTERED)
        dweight_h += dy_h * xhat_h
        if CENTERED:
            dbias_h += dy_h
        if TAIL:
            dy_t = next_dy_t.to(tl.float32)
            xhat_t = _normalized(next_q_t, next_e_t, rstd, mean, GROUP, TAIL)
            next_dy_t, next_q_t, next_e_t = _load_piece(
                dy_ptr, x_ptr, e_ptr, after, HEAD, M, N, GROUP, TAIL
            )
            g_t = dy_t * weight_t.to(tl.float32)
            projection_t, total_t = _averages(g_t, xhat_t, N, CENTERED)
            projection += projection_t
            total += total_t
            dweight_t += dy_t * xhat_t
            if CENTERED:
                dbias_t += dy_t
            residual_t = 0.0
            if HAS_RESIDUAL:
                residual_t = load_row(residual_ptr, row, o_t, M, N)
            _store_gradient(
                g_t, xhat_t, projection, total, rstd, residual_t, dx_ptr, row, o_t, N, HAS_RESIDUAL
            )
        residual_h = 0.0
        if AHEAD:
            residual_h = next_residual
            next_residual = load_row(residual_ptr, after, o_h, M, N)
        elif HAS_RESIDUAL:
            residual_h = load_row(residual_ptr, row, o_h, M, N)
        _store_gradient(
            g_h, xhat_h, projection, total, rstd, residual_h, dx_ptr, row, o_h, N, HAS_RESIDUAL
        )
    row = tl.program_id(0)
    store_row(dweight_h, dweight_ptr, row, o_h, N)
    if CENTERED:
        store_row(dbias_h, dbias_ptr, row, o_h, N)
    if TAIL:
        store_row(dweight_t, dweight_ptr, row, o_t, N)
        if CENTERED:
            store_row(dbias_t, dbias_ptr, row, o_t, N)


def _norm_bwd_triton(
    dy: Tensor, x: Tensor, exponents: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    centered = mean.numel() > 0
    programs, options = walked("bwd", max(1, M), N)  # none: writes zero sums
    dx = torch.empty_like(dy)
    sums = torch.empty((1 + centered, programs, N), dtype=torch.float32, device=dy.device)
    launch(
        _norm_bwd_kernel, (programs,),
        dy_ptr=dy, x_ptr=x, e_ptr=exponents, weight_ptr=weight, rstd_ptr=rstd, mean_ptr=mean,
        residual_ptr=residual, dx_ptr=dx, dweight_ptr=sums[0], dbias_ptr=sums[-1], M=M, N=N,
        programs=programs, HAS_RESIDUAL=residual is not None, CENTERED=centered,
        GROUP=N // exponents.shape[1], **options,
    )  # fmt: skip
    # Two sums, not two views of one: an op's results may not share memory.
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
