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
) -> Tensor:
    """Compute s_i x_i^T P_i, each [n_i, r_i] flattened, one after the other in P's dtype."""
    gradients = []
    parts = zip(starts, sizes, p.float().split(list(ranks), 1), factors, strict=True)
    for start, size, inner, factor in parts:
        columns = to_float(q[:, start : start + size])
        gradients.append((columns.t() @ inner).mul_(scale * factor).flatten())
    return torch.cat(gradients).to(p.dtype)


def append_low_rank(
    q: Tensor,
    scale: Tensor,
    u: Tensor,
    u_scale: Tensor,
    other_scale: Tensor,
    other_u_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Quantize u [M, R] as further columns of q [M, N]; return both and their scale."""
    fmt = next(fmt for fmt in FORMATS.values() if fmt.dtype == q.dtype)
    share = u_scale.sqrt() * other_u_scale.sqrt() / (scale.sqrt() * other_scale.sqrt())
    power = ((share.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    smaller = torch.where(share > 1.0, power, 1.0)
    factor = (share / smaller / u_scale).clamp(max=torch.finfo(torch.float32).max)
    columns = q.new_zeros((len(q), pad_length(u.shape[1])), dtype=torch.uint8)
    columns[:, : u.shape[1]] = cast(u.float() * factor, fmt).view(torch.uint8)
    if smaller > 1.0:
        q = cast(to_float(q) * (1.0 / smaller), fmt)
    wide = torch.cat([q.view(torch.uint8), columns], 1).view(q.dtype)
    return wide, scale * smaller
