"""GEMMs with narrow matrices: numerics of ``low_rank.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coat_kernels.reference.quantize import to_float


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
