"""Encoder layers of SigLIP and CLIP with the FP8 flow; parameters stay theirs.

    BF16 residual -> [LayerNorm -> FP8 -> q, k, v] -> BF16 attention -> FP8 -> out_proj -> +
    BF16 residual -> [LayerNorm -> FP8 -> fc1 -> GELU -> FP8 -> fc2] -> +

A bracket is one autograd Function (``projection.py``, ``mlp.py``); the first blocks multiply
before they round (``fp8.bf16_forward_first``).
"""

from typing import Any

from torch import Tensor

from coat_vlm.fp8.attention import attention_output, dropout_of
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.projection import norm_heads

SUPPORTED = ("SiglipEncoderLayer", "CLIPEncoderLayer")
"""Classes of transformers that this forward pass reproduces."""

GELUS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
"""transformers' names (``ACT2FN``) -> the kernels'."""

LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    *("mlp.fc1", "mlp.fc2"),
)
"""The linear layers whose weights the forward pass reads."""


class Fp8EncoderLayer:
    """Mixed into an encoder layer's class in front of it; see :mod:`coat_vlm.fp8.convert`."""

    fp8_group_size: int
    """Groups of the kept FP8 copies."""
    fp8_lean: bool
    """Whether attention keeps FP8 copies, too."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[B, T, hidden] to the same, as the layer it replaces; attention weights are not kept.

        Args:
            hidden_states: the residual stream.
            attention_mask: as the model makes it for its attention implementation.
            **kwargs: passed to the attention implementation.
        """
        attention = self.self_attn
        parts, copies, residual = norm_heads(
            hidden_states, self.layer_norm1, attention, self.fp8_group_size, self.fp8_lean
        )
        dropout = dropout_of(attention, attention.dropout)
        delta = attention_output(
            attention,
            parts,
            attention_mask,
            attention.out_proj,
            self.fp8_lean and not dropout,  # the backward pass cannot repeat dropout
            copies,
            is_causal=attention.is_causal,
            scaling=attention.scale,
            dropout=dropout,
            **kwargs,
        )
        del parts, copies  # what no name holds is freed before the MLP needs memory
        mlp = self.mlp
        y, residual = norm_mlp(
            residual,
            self.layer_norm2,
            (mlp.fc1,),
            mlp.fc2,
            GELUS[mlp.config.hidden_act],
            self.fp8_group_size,
            delta=delta,
        )
        return residual + y
