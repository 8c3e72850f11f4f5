"""Reference of the FP8 GEMM: dequantizes to FP32, multiplies, rounds."""

import torch
from torch import Tensor

from coat_kernels.reference.quantize import to_float


def scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, _fast: bool = False,
) -> Tensor:  # fmt: skip
    """Compute (a [M, K] @ b [N, K]^T) * (a_scale * b_scale) + bias [N] in FP32; round to dtype.

    Scales are FP32 []. The bias is rounded to ``dtype`` before it is added. Fast accumulation has
    no effect.
    """
    y = (to_float(a) @ to_float(b).t()).mul_(a_scale * b_scale)
    if bias is not None:
        y.add_(bias.to(dtype).float())
    return y.to(dtype)
