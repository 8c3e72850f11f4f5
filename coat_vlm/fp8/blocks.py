"""Forward passes in FP8 for layers of transformers, with the original parameters.

Decoder layers (Llama, Mistral, Qwen, Gemma 3):

    residual -> [RMSNorm -> FP8 -> q, k, v -> rope] -> attention -> FP8 -> o_proj -> +
    residual -> [RMSNorm -> FP8 -> gate, up -> SwiGLU -> FP8 -> down_proj] -> +

Encoder layers (SigLIP, CLIP, SmolVLM, Idefics 3, InternVL, Qwen-VL's towers):

    residual -> [norm -> FP8 -> q, k, v] -> attention -> FP8 -> out_proj -> +
    residual -> [norm -> FP8 -> fc1 -> GELU -> FP8 -> fc2] -> +

A bracket is one autograd Function (``norm_qkv.py``, ``mlp.py``). Everything else stays in the
model's dtype, as in the paper (arXiv 2410.19313, figure 2), also what a family computes between a
bracket and its ``+``: Gemma 3's second norms, InternVL's layer scale.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import Cache
from transformers.utils.generic import is_flash_attention_requested

from coat_vlm.fp8.attention import attention_output
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.norm_qkv import norm_heads
from coat_vlm.model.packing import PACKED, Packing

_GELUS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_GATED = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


class Fp8Layer:
    """Base of the mixins in front of a layer's class; see :mod:`coat_vlm.fp8.convert`."""

    ORIGINALS: ClassVar[Sequence[str]]
    """Classes of transformers that this forward pass reproduces."""
    LINEARS: ClassVar[Sequence[str]]
    """The linear layers whose weights the forward pass reads, in its order."""
    ACTIVATIONS: ClassVar[dict[str, str]]
    """Names in transformers (``ACT2FN``) -> names in coat_kernels."""

    fp8_group_size: int
    """Channels per scale of saved activations."""
    fp8_recompute_qkv: bool = False
    """Whether backward computes q, k and v again; may change between two steps."""


class Fp8DecoderLayer(Fp8Layer):
    """Mixin for decoder layers."""

    ORIGINALS = (
        *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        *("Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer", "Gemma3DecoderLayer"),
    )
    LINEARS = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    ACTIVATIONS = _GATED

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
        """Map [B, T, hidden] to the same shape like the original; returns no attention weights."""
        attention = self.self_attn
        assert position_embeddings is not None
        dropout = attention.attention_dropout if attention.training else 0.0
        # A cache saves attention's inputs. The backward pass cannot repeat dropout.
        recompute = self.fp8_recompute_qkv and past_key_values is None and not dropout
        (query, key, value), source, residual = norm_heads(
            hidden_states,
            self.input_layernorm,
            attention,
            self.fp8_group_size,
            recompute,
            position_embeddings,
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        # Mistral has its window in the configuration, Qwen in the module, Llama has none.
        window = getattr(attention.config, "sliding_window", None)
        delta = attention_output(
            attention,
            (query, key, value),
            attention_mask,
            attention.o_proj,
            source,
            dropout=dropout,
            scaling=attention.scaling,
            sliding_window=getattr(attention, "sliding_window", window),
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        del query, key, value, source  # frees memory before the MLP
        norm, mlp = self.post_attention_layernorm, self.mlp
        second_norms = hasattr(self, "pre_feedforward_layernorm")  # Gemma 3's
        if second_norms:
            delta, norm = norm(delta), self.pre_feedforward_layernorm
        y, residual = norm_mlp(
            residual,
            norm,
            (mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
            self.ACTIVATIONS[activation_of(attention)],
            self.fp8_group_size,
            delta=delta,
        )
        return residual + (self.post_feedforward_layernorm(y) if second_norms else y)


class Fp8Encoder(Fp8Layer):
    """Base of the mixins for encoder layers."""

    ACTIVATIONS = _GELUS


class Fp8EncoderLayer(Fp8Encoder):
    """Mixin for encoder layers of images that have a row each."""

    ORIGINALS = (
        *("SiglipEncoderLayer", "CLIPEncoderLayer"),
        *("SmolVLMEncoderLayer", "Idefics3EncoderLayer"),
    )
    LINEARS = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        *("mlp.fc1", "mlp.fc2"),
    )

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map [B, T, hidden] to the same shape like the original; returns no attention weights."""
        attention = self.self_attn
        return _encode(
            self,
            hidden_states,
            (self.layer_norm1, self.layer_norm2),
            attention,
            attention_mask,
            is_causal=attention.is_causal,
            scaling=attention.scale,
            dropout=attention.dropout if attention.training else 0.0,
            **kwargs,
        )


class Fp8ScaledEncoderLayer(Fp8Encoder):
    """Mixin for encoder layers with layer scale: InternVL's."""

    ORIGINALS = ("InternVLVisionLayer",)
    LINEARS = (
        *("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        *("attention.projection_layer", "mlp.fc1", "mlp.fc2"),
    )

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Map [B, T, hidden] to the same shape like the original."""
        attention = self.attention
        return _encode(
            self,
            hidden_states,
            (self.layernorm_before, self.layernorm_after),
            attention,
            scale_branches=(
                lambda delta: self.lambda_1 * attention.projection_dropout(delta),
                lambda y: self.lambda_2 * self.dropout(y),
            ),
            is_causal=False,
            scaling=attention.scale,
            dropout=attention.attention_dropout if attention.training else 0.0,
        )


class Fp8PackedEncoderLayer(Fp8Encoder):
    """Mixin for encoder layers of images packed into one row: Qwen3-VL's."""

    ORIGINALS = ("Qwen3VLVisionBlock",)
    LINEARS = (*("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"),)

    def forward(
        self: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map [T, hidden] to the same shape like the original.

        ``cu_seqlens`` [N + 1] are the bounds of images or windows. Attention is computed by flash
        attention if the model is configured with one, otherwise by ``sdpa_packed``, not by one call
        per image or window as in the original.
        """
        attention = self.attn
        implementation = None if is_flash_attention_requested(attention.config) else PACKED
        longest = _find_longest(cu_seqlens) if max_seqlen is None else max_seqlen
        out = _encode(
            self,
            hidden_states[None],
            (self.norm1, self.norm2),
            attention,
            None,
            position_embeddings,
            implementation=implementation,
            is_causal=False,
            scaling=attention.scaling,
            dropout=attention.attention_dropout if attention.training else 0.0,
            **Packing(cu_seqlens.int(), longest).to_kwargs(),
            **kwargs,
        )
        return out[0]


class Fp8GatedPackedEncoderLayer(Fp8PackedEncoderLayer):
    """Mixin for packed encoder layers with a gated MLP: Qwen2.5-VL's."""

    ORIGINALS = ("Qwen2_5_VLVisionBlock",)
    LINEARS = (*("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),)
    ACTIVATIONS = _GATED


FP8_LAYERS: dict[str, type[Fp8Layer]] = {
    name: layer
    for layer in (
        *(Fp8DecoderLayer, Fp8EncoderLayer, Fp8ScaledEncoderLayer),
        *(Fp8PackedEncoderLayer, Fp8GatedPackedEncoderLayer),
    )
    for name in layer.ORIGINALS
}
"""Name of a class of transformers -> mixin that replaces its forward pass."""


def activation_of(attention: Any) -> str:
    """Return transformers' name of the activation of an attention module's block."""
    config = attention.config
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _encode(
    block: Any,
    x: Tensor,
    norms: tuple[nn.Module, nn.Module],
    attention: Any,
    mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale_branches: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None,
    *,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Run an encoder layer on the residual stream x [B, T, hidden].

    ``scale_branches`` are applied to the outputs of attention and MLP before they are added.
    """
    # LINEARS is in the order of use: heads, the output projection, the MLP's first layers, its last
    names = block.LINEARS
    number = 1 if hasattr(attention, "qkv") else 3
    out, *into, last = (block.get_submodule(name) for name in names[number:])
    recompute = block.fp8_recompute_qkv and not dropout  # backward cannot repeat dropout
    heads, source, residual = norm_heads(
        x, norms[0], attention, block.fp8_group_size, recompute, position_embeddings
    )
    delta = attention_output(attention, heads, mask, out, source, dropout=dropout, **kwargs)
    del heads, source  # frees memory before the MLP
    if scale_branches is not None:
        delta = scale_branches[0](delta)
    y, residual = norm_mlp(
        residual,
        norms[1],
        into,
        last,
        block.ACTIVATIONS[activation_of(attention)],
        block.fp8_group_size,
        delta=delta,
    )
    return residual + (y if scale_branches is None else scale_branches[1](y))


_longest: MutableMapping[Tensor, int] = WeakIdKeyDictionary()


def _find_longest(bounds: Tensor) -> int:
    """Return the longest sequence's tokens; synchronizes with a GPU once per tensor of bounds."""
    if bounds not in _longest:
        _longest[bounds] = int(bounds.diff().max())
    return _longest[bounds]
