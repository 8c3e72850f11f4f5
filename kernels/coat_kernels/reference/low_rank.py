"""GEMMs with narrow matrices: numerics of ``low_rank.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coat_kernels.formats import FORMATS, pad_length
from coat_kernels.reference.quantize import cast, to_float


def low_rank_project(
    q: Tensor,
    scale: Tensor,
    matrices: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    transposed: bool,
) -> Tensor:
    """Compute s_i x_i U_i side by side, [M, sum of r_i] in the matrices' dtype."""
    parts = []
    for matrix, start, factor in zip(matrices, starts, factors, strict=True):
        u = matrix.t() if transposed else matrix
        columns = to_float(q[:, start : start + len(u)])
        parts.append((columns @ u.float()).mul_(scale * factor))
    return torch.cat(parts, 1).to(matrices[0].dtype)


def low_rank_gradient(
    q: Tensor,
    scale: Tensor,
    p: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
    ranks: Sequence[int],
    factors: Sequence[float],
    transposed: bool,
) -> Tensor:
    """Compute s_i x_i^T P_i, each [n_i, r_i] flattened, one after the other in P's dtype."""
    gradients = []
    parts = zip(starts, sizes, p.float().split(list(ranks), 1), factors, strict=True)
    for start, size, inner, factor in parts:
        columns = to_float(q[:, start : start + size])
        product = (columns.t() @ inner).mul_(scale * factor)
        gradients.append((product.t() if transposed else product).flatten())
    return torch.cat(gradients).to(p.dtype)


def append_low_rank(
    a: Tensor,
    a_scale: Tensor,
    p: Tensor,
    p_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    matrices: Sequence[Tensor],
    u_scale: Tensor,
    starts: Sequence[int],
    factors: Sequence[float],
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize P [M, R] as further columns of a, and blocks s_i U_i as b's; return their scales."""
    blocks = [(matrix.t() if transposed else matrix).float() for matrix in matrices]
    u, first = torch.zeros(len(b), p.shape[1], device=p.device), 0
    for block, start, factor in zip(blocks, starts, factors, strict=True):
        u[start : start + len(block), first : first + block.shape[1]] = block * factor
        first += block.shape[1]
    u_scale = u_scale * (max(map(abs, factors)) or 1.0)
    share = p_scale.sqrt() * u_scale.sqrt() / (a_scale.sqrt() * b_scale.sqrt())
    power = ((share.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    smaller = torch.where(share > 1.0, power, 1.0)
    wide_a = _append(a, p.float(), smaller, share / smaller / p_scale)
    wide_b = _append(b, u, smaller, share / smaller / u_scale)
    return wide_a, a_scale * smaller, wide_b, b_scale * smaller


def _append(q: Tensor, u: Tensor, smaller: Tensor, factor: Tensor) -> Tensor:
    fmt = next(fmt for fmt in FORMATS.values() if fmt.dtype == q.dtype)
    columns = q.new_zeros((len(q), pad_length(u.shape[1])), dtype=torch.uint8)
    factor = factor.clamp(max=torch.finfo(torch.float32).max)
    columns[:, : u.shape[1]] = cast(u * factor, fmt).view(torch.uint8)
    if smaller > 1.0:
        q = cast(to_float(q) * (1.0 / smaller), fmt)
    return torch.cat([q.view(torch.uint8), columns], 1).view(q.dtype)
