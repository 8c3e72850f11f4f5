"""Every op in plain PyTorch, with the rounding points of the kernels: the numerics.

One module per operation, named as in :mod:`coat_kernels`. All arithmetic is FP32. ``x`` may be
FP32, BF16 or FP16; results named ``y`` come back in the dtype the docstring says. These functions
are what runs on a CPU, and what the kernels are tested against: quantization bit for bit,
everything that sums or exponentiates to a relative tolerance.

Shapes: M tokens, N or K channels, G channels per group, M' tokens padded to a multiple of 16.
"""

from coat_kernels.reference.activation import (
    ACTIVATIONS as ACTIVATIONS,
)
from coat_kernels.reference.activation import (
    activation_apply as activation_apply,
)
from coat_kernels.reference.activation import (
    activation_bwd as activation_bwd,
)
from coat_kernels.reference.activation import (
    activation_bwd_stats as activation_bwd_stats,
)
from coat_kernels.reference.activation import (
    activation_gradient as activation_gradient,
)
from coat_kernels.reference.activation import (
    activation_stats as activation_stats,
)
from coat_kernels.reference.activation import (
    activation_values as activation_values,
)
from coat_kernels.reference.adamw import (
    adamw_step as adamw_step,
)
from coat_kernels.reference.adamw import (
    decode_moment as decode_moment,
)
from coat_kernels.reference.adamw import (
    encode_moment as encode_moment,
)
from coat_kernels.reference.cross_entropy import (
    cross_entropy_ as cross_entropy_,
)
from coat_kernels.reference.gemm import (
    scaled_mm as scaled_mm,
)
from coat_kernels.reference.norm import (
    norm_apply as norm_apply,
)
from coat_kernels.reference.norm import (
    norm_bwd as norm_bwd,
)
from coat_kernels.reference.norm import (
    norm_stats as norm_stats,
)
from coat_kernels.reference.norm import (
    norm_values as norm_values,
)
from coat_kernels.reference.quantize import (
    dequantize_group as dequantize_group,
)
from coat_kernels.reference.quantize import (
    dequantize_rows as dequantize_rows,
)
from coat_kernels.reference.quantize import (
    dequantize_tensor as dequantize_tensor,
)
from coat_kernels.reference.quantize import (
    quantize_gradient as quantize_gradient,
)
from coat_kernels.reference.quantize import (
    quantize_group as quantize_group,
)
from coat_kernels.reference.quantize import (
    quantize_rows as quantize_rows,
)
from coat_kernels.reference.quantize import (
    quantize_tensor as quantize_tensor,
)
from coat_kernels.reference.quantize import (
    tensor_scale as tensor_scale,
)
from coat_kernels.reference.quantize import (
    transpose_codes as transpose_codes,
)
from coat_kernels.reference.rope import (
    rope as rope,
)
from coat_kernels.reference.rope import (
    rope_gradient as rope_gradient,
)
from coat_kernels.reference.rope import (
    rope_gradient_values as rope_gradient_values,
)
from coat_kernels.reference.rope import (
    rope_quantize as rope_quantize,
)
