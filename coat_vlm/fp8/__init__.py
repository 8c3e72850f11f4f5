"""FP8 training of transformers models following COAT (arXiv 2410.19313): :func:`convert`.

A linear layer is three FP8 GEMMs (``gemm.py``). Their operands have one FP32 scale per tensor, from
its largest magnitude just before (no delayed scaling); the scale of a norm's output follows from
the norm's weights. Casts round to nearest; only the optimizer
uses stochastic rounding. Parameters stay in the model's dtype. The two precisions differ in what is
quantized, and in what is saved for backward, per token:

``fp8_linear``: Each linear layer of a block by itself (``linear.py``). Saves x in E4M3: K bytes.
    Norms, activations, attention and residual sums are the model's own, in high precision.

``coat``: A block is three autograd Functions, high precision at both ends and FP8 inside: norm and
    QKV; attention and its output projection; norm and MLP. Layers that read the same input have
    one fused weight (QKV, gate-up): one scale, one GEMM each way.

        x -> [norm -> x8 -> QKV GEMM -> rope] -> attention -> [o8 -> out GEMM] -> delta
        x + delta -> [norm -> x8 -> gate-up GEMM -> h -> activation -> h8 -> down GEMM] -> +

    Saved in FP8: each norm's *input* (K + K / G bytes) and the activation's input h (W + W / G),
    E4M3 with a power-of-two scale per group of G channels, one E8M0 byte (``fp8.group_size``).
    Saved in FP32: one or two norm statistics per token, the per-tensor scales, attention's
    log-sum-exp. Saved in the model's dtype: q, k, v and attention's output. The forward pass
    itself uses the exact values; backward differentiates norm and activation at the saved ones,
    and recomputes the GEMM inputs from them, transposed, for the grad-weight GEMMs.

    With ``fp8.recompute_qkv`` a block computes the same, but saves x8 of the QKV GEMM instead of q,
    k and v (``attention.py``).

The residual stream, rotary embedding and attention's arithmetic are never FP8. Some blocks of tower
and language model (``fp8.bf16_forward``) run the forward GEMMs in BF16 (FP32 on a CPU)
and save what ``coat`` saves; their other two GEMMs are FP8. The output layer computes only its
gradients in FP8 (``output_layer.py``).

Differences from the paper and its released code: group scales are powers of two (theirs are BF16);
in the forward pass norms and activations read their exact inputs, not the saved FP8 data; their
outputs are recomputed, not saved; QKV and gate-up weights are fused; ``fp8.recompute_qkv``.

The path of an activation through the files:

    blocks.py      decoder and encoder layers: the order of what follows
    norm_qkv.py    norm -> QKV GEMM -> rope -> q, k, v          (autograd Function)
    attention.py   attention -> output projection               (autograd Function; sdpa.py:
                   torch's fused kernels, forward and backward)
    mlp.py         norm -> GEMM -> activation -> GEMM           (autograd Function)
    experts.py     norm -> router -> grouped GEMMs of experts   (autograd Function)
    norm.py        the norm and the GEMM that reads it, both passes
    linear.py      one linear layer                             (autograd Function)
    gemm.py        the three GEMMs;  weights.py: where the FP8 weights come from
    coat_kernels   one op per step: norm_fwd, scaled_mm, activation_fwd, rope, ...

``convert.py`` converts models, ``cuda_graphs.py`` launches blocks as CUDA graphs,
``memory_choices.py`` decides where, ``saturation.py`` counts saturation, ``block_error.py``
compares blocks with BF16.
"""

from coat_vlm.fp8.convert import (
    Arithmetic,
    ConversionReport,
    arithmetic_of,
    arithmetic_of_recipe,
    convert,
    find_gpu_problem,
    fp8_blocks,
    store_frozen_weights,
)
from coat_vlm.fp8.cuda_graphs import captured_bytes, find_graphs, graph_blocks
from coat_vlm.fp8.linear import linear
from coat_vlm.fp8.memory_choices import SpareMemory
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.saturation import watching
from coat_vlm.fp8.weights import reused_weights, saved_bytes, share_stored, without_originals

__all__ = [
    "Arithmetic",
    "ConversionReport",
    "SpareMemory",
    "arithmetic_of",
    "arithmetic_of_recipe",
    "captured_bytes",
    "convert",
    "find_gpu_problem",
    "find_graphs",
    "fp8_blocks",
    "graph_blocks",
    "linear",
    "norm_mlp",
    "reused_weights",
    "saved_bytes",
    "share_stored",
    "store_frozen_weights",
    "watching",
    "without_originals",
]
