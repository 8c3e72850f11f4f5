"""FP8 GEMM through ``torch._scaled_mm``, without Triton; both operands have rows along K.

    y = (a @ b^T) * (a_scale * b_scale) + bias

Hopper's FP8 tensor cores require both operands with K contiguous, so the quantize functions also
write transposed data, with tokens padded with zeros to M'. The kernel is cuBLASLt's. Partial sums
are promoted to FP32; with fast accumulation the tensor cores sum all of K with fewer bits, which
takes 3 to 7% less time (``scripts/bench/gemm.py``). A bias is rounded to the result's dtype, the
only dtype that cuBLASLt's epilogue supports. Reference: ``reference.scaled_mm``.
"""

import torch
from torch import Tensor

from coat_kernels import reference
from coat_kernels.formats import (
    E5M2,
    GEMM_MULTIPLE,
    HIGH_PRECISION,
    TensorScaled,
    check_quantized,
    check_vector,
)
from coat_kernels.registry import register


@register(
    fake=lambda a, _a_scale, b, _b_scale, _bias, dtype, _fast: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=dtype
    ),
)
def _scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    if not a.numel() or not b.numel():
        return reference.scaled_mm(a, a_scale, b, b_scale, bias, dtype, fast)
    fused = bias.to(dtype) if bias is not None and dtype != torch.float32 else None
    y = torch.ops.aten._scaled_mm(
        a, b.t(), a_scale, b_scale, bias=fused, out_dtype=dtype, use_fast_accum=fast
    )
    return y if bias is None or fused is not None else y + bias


def scaled_mm(
    a: TensorScaled,
    b: TensorScaled,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """Multiply a [M, K] with b [N, K]; at most one of them is E5M2; add a bias [N].

    Returns [M, N] in ``dtype``: FP32, BF16 or FP16. ``fast``: fast accumulation.
    """
    check_quantized("scaled_mm", "a", a.q)
    check_quantized("scaled_mm", "b", b.q)
    (M, K), (N, K_b) = a.q.shape, b.q.shape
    if K_b != K or K % GEMM_MULTIPLE or N % GEMM_MULTIPLE:
        raise ValueError(
            f"scaled_mm: a is [M, K] = [{M}, {K}] and b is [N, K] = [{N}, {K_b}]; K must be the "
            f"same and K and N multiples of {GEMM_MULTIPLE}: pad the layer, or leave it in BF16"
        )
    if a.q.dtype == b.q.dtype == E5M2.dtype:
        raise ValueError(
            "scaled_mm: both operands are E5M2, which the tensor cores do not support; quantize "
            "activations and weights to E4M3"
        )
    if dtype not in HIGH_PRECISION:
        raise ValueError(
            f"scaled_mm: the result cannot be {dtype}; use one of "
            f"{', '.join(map(str, HIGH_PRECISION))}"
        )
    check_vector("scaled_mm", "bias", bias, N)
    return _scaled_mm(a.q, a.scale, b.q, b.scale, bias, dtype, fast)
