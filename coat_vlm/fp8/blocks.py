"""Forward passes in FP8 for layers of transformers, with the original parameters.

Decoder layers of Llama, Mistral, Qwen2/2.5 and Qwen3:

    residual -> [RMSNorm -> FP8 -> q, k, v -> rope] -> attention -> FP8 -> o_proj -> +
    residual -> [RMSNorm -> FP8 -> gate, up -> SwiGLU -> FP8 -> down_proj] -> +

Encoder layers of SigLIP and CLIP:

    residual -> [LayerNorm -> FP8 -> q, k, v] -> attention -> FP8 -> out_proj -> +
    residual -> [LayerNorm -> FP8 -> fc1 -> GELU -> FP8 -> fc2] -> +

A bracket is one autograd Function (``heads.py``, ``mlp.py``); the forward GEMMs of the first blocks
are BF16 (``fp8.bf16_forward_first``). Rotary embedding, attention and the residual stream stay in
the model's dtype, as in the paper (arXiv 2410.19313, figure 2).
"""

from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache

from coat_vlm.fp8.attention import attention_output, round_heads
from coat_vlm.fp8.heads import norm_heads
from coat_vlm.fp8.mlp import norm_mlp


class Fp8DecoderLayer:
    """Mixin in front of a decoder layer's class; see :mod:`coat_vlm.fp8.convert`."""

    ORIGINALS = (
        "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"
    )  # fmt: skip
    """Classes of transformers that this forward pass reproduces."""
    LINEARS = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    """The linear layers whose weights the forward pass reads."""
    ACTIVATIONS: ClassVar = {"silu": "silu_mul", "swish": "silu_mul"}
    """Names in transformers (``ACT2FN``) -> names in coat_kernels."""

    fp8_group_size: int
    """Groups of the saved FP8 quantized."""
    fp8_lean: bool
    """Whether attention saves FP8 quantized, too."""

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
        """Map [B, T, hidden] to the same shape like the original; returns no attention weights.

        Args:
            hidden_states: the residual stream.
            attention_mask: the model's mask for its attention implementation.
            position_ids: passed to the attention implementation (packed sequences need them).
            past_key_values: the cache of generation, updated in place.
            use_cache: passed to the attention implementation.
            position_embeddings: (cos, sin) of the rotary embedding.
            **kwargs: passed to the attention implementation.
        """
        attention = self.self_attn
        assert position_embeddings is not None
        (query, key, value), quantized, residual = norm_heads(
            hidden_states,
            self.input_layernorm,
            attention,
            self.fp8_group_size,
            self.fp8_lean,
            position_embeddings,
        )
        dropout = attention.attention_dropout if attention.training else 0.0
        # A cache saves attention's inputs. The backward pass cannot repeat dropout.
        lean = self.fp8_lean and past_key_values is None and not dropout
        if self.fp8_lean and not lean and quantized is None:
            query, key, value = map(round_heads, (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        # Mistral has its window in the configuration, Qwen in the module, Llama has none.
        window = getattr(attention.config, "sliding_window", None)
        delta = attention_output(
            attention,
            (query, key, value),
            attention_mask,
            attention.o_proj,
            lean,
            quantized,
            dropout=dropout,
            scaling=attention.scaling,
            sliding_window=getattr(attention, "sliding_window", window),
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        del query, key, value, quantized  # frees memory before the MLP
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


class Fp8EncoderLayer:
    """Mixin in front of an encoder layer's class; see :mod:`coat_vlm.fp8.convert`."""

    ORIGINALS = ("SiglipEncoderLayer", "CLIPEncoderLayer")
    LINEARS = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        *("mlp.fc1", "mlp.fc2"),
    )
    ACTIVATIONS: ClassVar = {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "quick_gelu": "quick_gelu",
    }

    fp8_group_size: int
    fp8_lean: bool

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map [B, T, hidden] to the same shape like the original; returns no attention weights.

        Args:
            hidden_states: the residual stream.
            attention_mask: the model's mask for its attention implementation.
            **kwargs: passed to the attention implementation.
        """
        attention = self.self_attn
        parts, quantized, residual = norm_heads(
            hidden_states, self.layer_norm1, attention, self.fp8_group_size, self.fp8_lean
        )
        dropout = attention.dropout if attention.training else 0.0
        delta = attention_output(
            attention,
            parts,
            attention_mask,
            attention.out_proj,
            self.fp8_lean and not dropout,  # the backward pass cannot repeat dropout
            quantized,
            is_causal=attention.is_causal,
            scaling=attention.scale,
            dropout=dropout,
            **kwargs,
        )
        del parts, quantized  # frees memory before the MLP
        mlp = self.mlp
        y, residual = norm_mlp(
            residual,
            self.layer_norm2,
            (mlp.fc1,),
            mlp.fc2,
            self.ACTIVATIONS[mlp.config.hidden_act],
            self.fp8_group_size,
            delta=delta,
        )
        return residual + y


FP8_LAYERS: dict[str, type[Fp8DecoderLayer] | type[Fp8EncoderLayer]] = {
    name: layer for layer in (Fp8DecoderLayer, Fp8EncoderLayer) for name in layer.ORIGINALS
}
"""Name of a class of transformers -> mixin that replaces its forward pass."""
