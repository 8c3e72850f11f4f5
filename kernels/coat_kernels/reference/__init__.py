"""Every op in plain PyTorch, with the rounding points of the kernels: the numerics.

One module per operation, named as in :mod:`coat_kernels`. All arithmetic is FP32. ``x`` may be
FP32, BF16 or FP16; docstrings state the dtype of results named ``y``. These functions run on a CPU,
and the kernels are tested against them: quantization bit for bit, sums and exponentials to a
relative tolerance.

Shapes: M tokens, N or K channels, G channels per group, M' tokens padded to a multiple of 16.
"""

# ruff: noqa: F401 - re-exports

from coat_kernels.reference.activation import (
    ACTIVATIONS,
    MARGIN,
    SAMPLE_EVERY,
    activation_apply,
    activation_bwd,
    activation_bwd_once,
    activation_bwd_stats,
    activation_gradient,
    activation_once,
    activation_stats,
    activation_values,
    is_gated,
)
from coat_kernels.reference.adamw import adamw_step, decode_moment, encode_moment
from coat_kernels.reference.cross_entropy import cross_entropy_, logit_gradient
from coat_kernels.reference.experts import expert_gradient, quantize_rows, scaled_grouped_mm
from coat_kernels.reference.gemm import scaled_mm
from coat_kernels.reference.gradient_sum import add_stochastic
from coat_kernels.reference.head_norm import head_norm, head_norm_bwd
from coat_kernels.reference.low_rank import (
    append_low_rank,
    low_rank_gradient,
    low_rank_project,
)
from coat_kernels.reference.norm import norm_bwd, norm_fwd, norm_recompute, norm_values
from coat_kernels.reference.quantize import (
    dequantize_group,
    dequantize_tensor,
    dither_scale,
    quantize_gradient,
    quantize_group,
    quantize_tensor,
    tensor_scale,
    transpose_quantized,
)
from coat_kernels.reference.rope import rope, rope_gradient, rope_gradient_values
