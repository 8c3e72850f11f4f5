"""FP8 kernels of COAT in Triton, with plain PyTorch references. Needs torch and triton only.

Formats and the scale convention: ``formats.py``. Numerics of every op in plain PyTorch:
``reference``. Each op is a ``torch.library`` op: Triton on CUDA, the reference on CPU.
"""

from coat_kernels.activation import (
    ACTIVATIONS,
    ActivationSaved,
    activation_bwd,
    activation_bwd_stats,
    activation_fwd,
    activation_recompute,
)
from coat_kernels.adamw import AdamwItem, AdamwTable, adamw_step
from coat_kernels.cross_entropy import cross_entropy_
from coat_kernels.formats import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    GROUP_SIZES,
    Format,
    GradientCodes,
    GroupScaled,
    RowScaled,
    TensorScaled,
)
from coat_kernels.gemm import scaled_mm
from coat_kernels.master_weights import (
    MASTERS,
    join_master,
    round_stochastically,
    rounding_key,
    split_master,
)
from coat_kernels.moment_formats import (
    CODECS,
    GROUP,
    Codec,
    Moment,
    codec_called,
    groups_of,
    new_moment,
)
from coat_kernels.norm import NormSaved, norm_bwd, norm_fwd, norm_recompute
from coat_kernels.quantize import (
    dequantize_tensor,
    quantize_gradient,
    quantize_layouts,
    quantize_tensor,
    quantize_transposed,
    transpose_codes,
)
from coat_kernels.quantize_blockwise import (
    dequantize_group,
    dequantize_rows,
    quantize_group,
    quantize_rows,
)
from coat_kernels.reference import decode_moment, encode_moment
from coat_kernels.registry import OPS, Op, use_reference
from coat_kernels.rope import rope, rope_gradient, rope_quantize

__all__ = [
    "ACTIVATIONS",
    "CODECS",
    "E4M3",
    "E5M2",
    "GEMM_MULTIPLE",
    "GROUP",
    "GROUP_SIZES",
    "MASTERS",
    "OPS",
    "ActivationSaved",
    "AdamwItem",
    "AdamwTable",
    "Codec",
    "Format",
    "GradientCodes",
    "GroupScaled",
    "Moment",
    "NormSaved",
    "Op",
    "RowScaled",
    "TensorScaled",
    "activation_bwd",
    "activation_bwd_stats",
    "activation_fwd",
    "activation_recompute",
    "adamw_step",
    "codec_called",
    "cross_entropy_",
    "decode_moment",
    "dequantize_group",
    "dequantize_rows",
    "dequantize_tensor",
    "encode_moment",
    "groups_of",
    "join_master",
    "new_moment",
    "norm_bwd",
    "norm_fwd",
    "norm_recompute",
    "quantize_gradient",
    "quantize_group",
    "quantize_layouts",
    "quantize_rows",
    "quantize_tensor",
    "quantize_transposed",
    "rope",
    "rope_gradient",
    "rope_quantize",
    "round_stochastically",
    "rounding_key",
    "scaled_mm",
    "split_master",
    "transpose_codes",
    "use_reference",
]
