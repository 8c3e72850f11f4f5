"""What a GPU kernel is for, by its name: how the profile of a step is put together.

Our own kernels are told one by one, so that a new one has to be given its kind. All others have
names that their libraries make; the patterns are those of cuBLASLt, CUTLASS, cuDNN, torch's flash
attention, ATen, Liger, DeepSpeed, torchao and NCCL as they stand in traces of Hopper GPUs.
"""

import re

FP8_PRODUCTS = "FP8 products"
OTHER_PRODUCTS = "products in BF16, FP16 or FP32"
ATTENTION = "attention"
WEIGHTS = "quantization of weights"
LOSS = "loss"
NORMS = "other norms"
OPTIMIZER = "optimizer and clipping"
COPIES = "copies and memsets"
NCCL = "NCCL"
ELEMENTWISE = "other element-wise ops and sums"
OTHER = "unknown"

QUANTIZE, ROWS, GROUPS = "FP8: quantize", "FP8: quantize by row", "FP8: quantize by group"
FP8_NORM, ACTIVATION, ROPE = "FP8: norm", "FP8: activation", "FP8: rotation"

OURS: dict[str, str] = {
    "_amax_kernel": QUANTIZE,
    "quantize_tensor_kernel": QUANTIZE,
    "_transpose_codes_kernel": QUANTIZE,
    "_dequantize_tensor_kernel": QUANTIZE,
    "_quantize_rows_kernel": ROWS,
    "_dequantize_rows_kernel": ROWS,
    "_quantize_group_kernel": GROUPS,
    "_dequantize_group_kernel": GROUPS,
    "_norm_stats_kernel": FP8_NORM,
    "_norm_apply_kernel": FP8_NORM,
    "_norm_bwd_kernel": FP8_NORM,
    "_activation_stats_kernel": ACTIVATION,
    "_activation_apply_kernel": ACTIVATION,
    "_activation_bwd_stats_kernel": ACTIVATION,
    "_activation_bwd_apply_kernel": ACTIVATION,
    "_rope_kernel": ROPE,
    "_rope_gradient_stats_kernel": ROPE,
    "_rope_gradient_kernel": ROPE,
    "_cross_entropy_kernel": LOSS,
    "adamw_kernel": OPTIMIZER,
    "adamw_scalars_kernel": OPTIMIZER,
}
"""The kernels of ``coat_kernels``."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (NCCL, r"^nccl"),
    (COPIES, r"^Memcpy|^Memset|direct_copy|copy_kernel|CatArrayBatchedCopy|FillFunctor"),
    # Before the products: attention is made of CUTLASS, too.
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    # cuBLASLt's letters of the operands: q is E4M3, r is E5M2, t BF16, h FP16, s FP32.
    (FP8_PRODUCTS, r"nvjet_(sm\d+_)?[qr][qr]|gemm_e[45]m[23]|cutlass.*e[45]m[23]|cutlass.*f8"),
    (OTHER_PRODUCTS, r"nvjet_|gemm|gemv|splitk|cutlass|cublas"),
    (LOSS, r"cross_entropy|nll_loss|soft_?max|element_mul"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lpnorm"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta"),
    (ELEMENTWISE, r"elementwise|reduce|^triton_|index|embedding|gather|scatter|_rope|swiglu|scan"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)


def kind_of(name: str) -> str:
    """The kind of a kernel, copy or memset; ``unknown`` if nothing fits its name."""
    if name in OURS:
        return OURS[name]
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def is_transfer(name: str) -> bool:
    """Whether it is a copy or memset of the driver, which is no kernel."""
    return name.startswith(("Memcpy", "Memset"))
