"""Decoder layers of Llama, Mistral, Qwen2/2.5 and Qwen3 with the FP8 flow; parameters stay theirs.

    BF16 residual -> [RMSNorm -> FP8 -> q, k, v -> BF16 rope] -> attention -> FP8 -> o_proj -> +
    BF16 residual -> [RMSNorm -> FP8 -> gate, up -> SwiGLU -> FP8 -> down_proj] -> +

A bracket is one autograd Function (``projection.py``, ``mlp.py``); the first blocks multiply
before they round (``fp8.bf16_forward_first``). Rotary embedding, attention and
the residual stream stay in the model's dtype, as in the paper (arXiv 2410.19313, figure 2).
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from coat_vlm.fp8.attention import attention_output, dropout_of
from coat_vlm.fp8.lean import rounded_heads
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.projection import norm_heads

SUPPORTED = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of transformers that this forward pass reproduces."""

LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""The linear layers whose weights the forward pass reads."""


class Fp8DecoderLayer:
    """Mixed into a decoder layer's class in front of it; see :mod:`coat_vlm.fp8.convert`."""

    fp8_group_size: int
    """Groups of the kept FP8 copies."""
    fp8_lean: bool
    """Whether attention keeps FP8 copies, too."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, T, hidden] to the same, as the layer it replaces; attention weights are not kept.

        Args:
            hidden_states: the residual stream.
            attention_mask: as the model makes it for its attention implementation.
            position_ids: passed to the attention implementation (packed sequences need them).
            past_key_values: the cache of generation, updated in place.
            use_cache: passed on, likewise.
            position_embeddings: (cos, sin) of the rotary embedding.
            **kwargs: passed to the attention implementation.
        """
        attention = self.self_attn
        assert position_embeddings is not None
        (query, key, value), copies, residual = norm_heads(
            hidden_states,
            self.input_layernorm,
            attention,
            self.fp8_group_size,
            self.fp8_lean,
            position_embeddings,
        )
        dropout = dropout_of(attention, attention.attention_dropout)
        # A cache keeps what attention works on. Dropout cannot be repeated by the backward pass.
        lean = self.fp8_lean and past_key_values is None and not dropout
        if self.fp8_lean and not lean and copies is None:
            query, key, value = map(rounded_heads, (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        # Mistral keeps its window in the configuration, Qwen in the module, Llama has none.
        window = getattr(attention.config, "sliding_window", None)
        delta = attention_output(
            attention,
            (query, key, value),
            attention_mask,
            attention.o_proj,
            lean,
            copies,
            dropout=dropout,
            scaling=attention.scaling,
            sliding_window=getattr(attention, "sliding_window", window),
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        del query, key, value, copies  # what no name holds is freed before the MLP needs memory
        mlp = self.mlp
        y, residual = norm_mlp(
            residual,
            self.post_attention_layernorm,
            (mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
            "silu_mul",
            self.fp8_group_size,
            delta=delta,
        )
        return residual + y
