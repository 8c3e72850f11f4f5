"""FP8 kernels of COAT in Triton, with plain PyTorch references. Needs torch and triton only.

Formats and the scale convention: ``formats.py``. Numerics of every op on one page: ``reference.py``
and ``reference_adamw.py``. Each op is a ``torch.library`` op: Triton on CUDA, the reference on CPU.
"""

from coat_kernels.activation import (
    ACTIVATIONS,
    ActivationSaved,
    activation_fwd,
    activation_recompute,
)
from coat_kernels.activation_gradient import activation_bwd
from coat_kernels.adamw import CODECS, GROUP, adamw_step, decode_moment, encode_moment, new_moment
from coat_kernels.codes import dequantize_tensor, transpose_codes
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
from coat_kernels.gradient import quantize_gradient
from coat_kernels.norm import NormSaved, norm_fwd, norm_recompute
from coat_kernels.norm_gradient import norm_bwd
from coat_kernels.quantize import (
    dequantize_group,
    quantize_group,
    quantize_layouts,
    quantize_tensor,
    quantize_transposed,
)
from coat_kernels.registry import OPS, Op, use_reference
from coat_kernels.rope import rope, rope_quantize
from coat_kernels.rope_gradient import rope_gradient
from coat_kernels.rows import dequantize_rows, quantize_rows

__all__ = [
    "ACTIVATIONS",
    "CODECS",
    "E4M3",
    "E5M2",
    "GEMM_MULTIPLE",
    "GROUP",
    "GROUP_SIZES",
    "OPS",
    "ActivationSaved",
    "Format",
    "GradientCodes",
    "GroupScaled",
    "NormSaved",
    "Op",
    "RowScaled",
    "TensorScaled",
    "activation_bwd",
    "activation_fwd",
    "activation_recompute",
    "adamw_step",
    "decode_moment",
    "dequantize_group",
    "dequantize_rows",
    "dequantize_tensor",
    "encode_moment",
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
    "scaled_mm",
    "transpose_codes",
    "use_reference",
]
