"""FP8 kernels of COAT in Triton, with plain PyTorch references. Needs torch and triton only.

Formats and the scale convention: ``formats.py``. Numerics of every op in plain PyTorch:
``reference``. Each op is a ``torch.library`` op: Triton on CUDA, the reference on CPU. Functions
raise ValueError if a shape, dtype or layout does not fit.
"""

from coat_kernels.activation import (
    ACTIVATIONS,
    ActivationSaved,
    activation_bwd,
    activation_bwd_once,
    activation_bwd_stats,
    activation_fwd,
)
from coat_kernels.adamw import AdamwItem, AdamwTable, adamw_step
from coat_kernels.cross_entropy import GRADIENT_SCALE, cross_entropy_, logit_gradient
from coat_kernels.experts import expert_gradient, quantize_rows, scaled_grouped_mm
from coat_kernels.formats import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    GROUP_SIZES,
    Format,
    GroupScaled,
    QuantizedGradient,
    TensorScaled,
)
from coat_kernels.gemm import scaled_mm
from coat_kernels.gradient_sum import add_stochastic
from coat_kernels.head_norm import head_norm, head_norm_bwd
from coat_kernels.low_rank import append_low_rank, low_rank_gradient, low_rank_project
from coat_kernels.master_weights import (
    MASTER_WEIGHTS,
    join_master,
    rounding_key,
)
from coat_kernels.moment_formats import GROUP, Moment, count_groups, new_moment
from coat_kernels.norm import NormSaved, norm_bwd, norm_fwd, norm_recompute
from coat_kernels.quantize import (
    dequantize_tensor,
    quantize_again,
    quantize_gradient,
    quantize_layouts,
    quantize_tensor,
    transpose_quantized,
)
from coat_kernels.quantize_blockwise import dequantize_group, quantize_group
from coat_kernels.reference import decode_moment, encode_moment
from coat_kernels.registry import OPS, Op
from coat_kernels.rope import rope, rope_gradient
from coat_kernels.shared_scales import share_scales

__all__ = [
    "ACTIVATIONS",
    "E4M3",
    "E5M2",
    "GEMM_MULTIPLE",
    "GRADIENT_SCALE",
    "GROUP",
    "GROUP_SIZES",
    "MASTER_WEIGHTS",
    "OPS",
    "ActivationSaved",
    "AdamwItem",
    "AdamwTable",
    "Format",
    "GroupScaled",
    "Moment",
    "NormSaved",
    "Op",
    "QuantizedGradient",
    "TensorScaled",
    "activation_bwd",
    "activation_bwd_once",
    "activation_bwd_stats",
    "activation_fwd",
    "adamw_step",
    "add_stochastic",
    "append_low_rank",
    "count_groups",
    "cross_entropy_",
    "decode_moment",
    "dequantize_group",
    "dequantize_tensor",
    "encode_moment",
    "expert_gradient",
    "head_norm",
    "head_norm_bwd",
    "join_master",
    "logit_gradient",
    "low_rank_gradient",
    "low_rank_project",
    "new_moment",
    "norm_bwd",
    "norm_fwd",
    "norm_recompute",
    "quantize_again",
    "quantize_gradient",
    "quantize_group",
    "quantize_layouts",
    "quantize_rows",
    "quantize_tensor",
    "rope",
    "rope_gradient",
    "rounding_key",
    "scaled_grouped_mm",
    "scaled_mm",
    "share_scales",
    "transpose_quantized",
]
