"""Forward passes in FP8 for layers of transformers, with the original parameters.

Decoder layers (Llama, Mistral, Qwen, Gemma, GLM-V):

    residual -> [RMSNorm -> FP8 -> q, k, v -> rope] -> attention -> FP8 -> o_proj -> +
    residual -> [RMSNorm -> FP8 -> gate, up -> SwiGLU -> FP8 -> down_proj] -> +

Encoder layers (SigLIP, CLIP, ViT, DINO, SmolVLM, Idefics 3, InternVL, Pixtral, Qwen-VL, GLM-V):

    residual -> [norm -> FP8 -> q, k, v] -> attention -> FP8 -> out_proj -> +
    residual -> [norm -> FP8 -> fc1 -> GELU -> FP8 -> fc2] -> +

A bracket is one autograd Function (``norm_qkv.py``, ``mlp.py``). Everything else stays in the
model's dtype, as in the paper (arXiv 2410.19313, figure 2), also what a family computes between a
bracket and its ``+``: Gemma's and GLM-V's second norms, layer scale of InternVL and DINO.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import Cache
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import _active_collector

from coat_vlm.fp8.attention import attention_output
from coat_vlm.fp8.experts import norm_experts
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.norm_qkv import norm_heads
from coat_vlm.model.packing import PACKED, PACKED_IMAGES, Packing

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
    NORMS: ClassVar[Sequence[str]]
    """The norms before attention and before the MLP, and the norms after them, if there are any."""
    ACTIVATIONS: ClassVar[dict[str, str]]
    """Names in transformers (``ACT2FN``) -> names in coat_kernels."""
    EXPERTS: ClassVar[str | None] = None
    """The module with the router ``gate`` and the ``experts``, if there is one."""
    NOTE: ClassVar[str] = ""
    """What :func:`coat_vlm.fp8.convert` reports in addition."""

    fp8_group_size: int
    """Channels per scale of saved activations."""
    fp8_recompute_qkv: bool = False
    """Whether backward computes q, k and v again; may change between two steps."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the block, and have transformers record its output after its hooks.

        ZeRO-3's hooks gather weights and reduce gradients: they must see all of its gradients.
        """
        states = (_active_collector.get() or {}).get("hidden_states", [])
        recorded = len(states)
        out = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if len(states) > recorded and states[-1] is not None:
            states[-1] = out
        return out


class Fp8DecoderLayer(Fp8Layer):
    """Mixin for decoder layers."""

    ORIGINALS = (
        *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        *("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"),
        "GemmaDecoderLayer",
    )
    LINEARS = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    NORMS = ("input_layernorm", "post_attention_layernorm")
    ACTIVATIONS = _GATED
    rotates_halves: ClassVar[bool] = True
    """Whether rotary channels i and i + D / 2 are a pair, as in the kernel; else the model's."""

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
        """Map [B, T, hidden] to the same shape; returns no attention weights."""
        attention = self.self_attn
        assert position_embeddings is not None
        first, second, *behind = (getattr(self, name) for name in self.NORMS)
        dropout = attention.attention_dropout if attention.training else 0.0
        # A cache saves attention's inputs. The backward pass cannot repeat dropout.
        recompute = self.fp8_recompute_qkv and past_key_values is None and not dropout
        (query, key, value), source, residual = norm_heads(
            hidden_states,
            first,
            attention,
            self.fp8_group_size,
            recompute,
            position_embeddings,
            self.rotates_halves,
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        # Mistral has its window in the configuration, Qwen in the module, Llama has none.
        window = getattr(attention.config, "sliding_window", None)
        softcap = getattr(attention, "attn_logit_softcapping", None)  # Gemma 2's
        if softcap is not None:
            kwargs["softcap"] = softcap
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
        y, residual = self.compute_mlp(residual, second, behind[0](delta) if behind else delta)
        return residual + (behind[1](y) if behind else y)

    def compute_mlp(self: Any, x: Tensor, norm: nn.Module, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute norm and MLP of x + delta, and x + delta."""
        *into, last = (self.get_submodule(name) for name in self.LINEARS[4:])
        activation = self.ACTIVATIONS[activation_of(self.self_attn)]
        return norm_mlp(x, norm, into, last, activation, self.fp8_group_size, delta=delta)


class Fp8GemmaDecoderLayer(Fp8DecoderLayer):
    """Mixin for decoder layers with norms after attention and MLP, of Gemma 2 and 3."""

    ORIGINALS = ("Gemma2DecoderLayer", "Gemma3DecoderLayer")
    NORMS = (
        *("input_layernorm", "pre_feedforward_layernorm"),
        *("post_attention_layernorm", "post_feedforward_layernorm"),
    )


class Fp8GlmDecoderLayer(Fp8DecoderLayer):
    """Mixin for GLM-V's decoder layers, which have gate and up in one linear layer."""

    ORIGINALS = ("Glm4vTextDecoderLayer",)
    LINEARS = (*Fp8DecoderLayer.LINEARS[:4], "mlp.gate_up_proj", "mlp.down_proj")
    NORMS = (
        *("input_layernorm", "post_attention_layernorm"),
        *("post_self_attn_layernorm", "post_mlp_layernorm"),
    )
    rotates_halves = False


class Fp8ExpertsDecoderLayer(Fp8DecoderLayer):
    """Mixin for decoder layers with a mixture of experts, of Qwen3-VL's larger models."""

    ORIGINALS = ("Qwen3VLMoeTextDecoderLayer",)
    LINEARS = Fp8DecoderLayer.LINEARS[:4]
    EXPERTS = "mlp"
    NOTE = ", the router in FP32, experts in FP8 under LoRA and else in BF16"

    def compute_mlp(self: Any, x: Tensor, norm: nn.Module, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute norm and experts of x + delta, and x + delta."""
        activation = self.ACTIVATIONS[activation_of(self.self_attn)]
        return norm_experts(x, norm, self.mlp, activation, self.fp8_group_size, delta)


class Fp8MlpLayer(Fp8Layer):
    """Mixin for decoder layers with FP8 only in the norm and MLP.

    The original's forward pass computes the rest in the model's dtype: linear attention, short
    convolutions, keys that layers share, inputs per layer.
    """

    ORIGINALS = ("Qwen3_5DecoderLayer",)
    LINEARS: ClassVar[Sequence[str]] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    NORMS = ("post_attention_layernorm",)
    ACTIVATIONS = _GATED
    NOTE = ", only its MLP"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the original; its norm returns the input, and the MLP normalizes it."""
        norm = getattr(self, self.NORMS[0])
        *into, last = (self.get_submodule(name) for name in self.LINEARS)
        mlp = self.get_submodule(self.LINEARS[0].partition(".")[0])
        activation = self.ACTIVATIONS[activation_of(mlp)]
        group_size = self.fp8_group_size

        def compute(x: Tensor) -> Tensor:
            return norm_mlp(x, norm, into, last, activation, group_size)[0]

        norm.forward, mlp.forward = nn.Identity.forward.__get__(norm), compute
        try:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            del norm.forward, mlp.forward


class Fp8GemmaMlpLayer(Fp8MlpLayer):
    """Mixin for Gemma 4's decoder layers."""

    ORIGINALS = ("Gemma4TextDecoderLayer",)
    NORMS = ("pre_feedforward_layernorm",)


class Fp8LfmMlpLayer(Fp8MlpLayer):
    """Mixin for LFM2's decoder layers."""

    ORIGINALS = ("Lfm2DecoderLayer",)
    LINEARS = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
    NORMS = ("ffn_norm",)


class Fp8Encoder(Fp8Layer):
    """Base of the mixins for encoder layers."""

    ACTIVATIONS = _GELUS


class Fp8EncoderLayer(Fp8Encoder):
    """Mixin for encoder layers of images that have a row each."""

    ORIGINALS = (
        *("SiglipEncoderLayer", "CLIPEncoderLayer"),
        *("SmolVLMEncoderLayer", "Idefics3EncoderLayer", "Siglip2EncoderLayer"),
    )
    LINEARS: ClassVar[Sequence[str]] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        *("mlp.fc1", "mlp.fc2"),
    )
    NORMS = ("layer_norm1", "layer_norm2")

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map [B, T, hidden] to the same shape; returns no attention weights."""
        return _encode(self, hidden_states, attention_mask, position_embeddings, **kwargs)


class Fp8PixtralEncoderLayer(Fp8EncoderLayer):
    """Mixin for Pixtral's encoder layers: images packed into one row with a mask, a gated MLP."""

    ORIGINALS = ("PixtralAttentionLayer",)
    LINEARS = (
        *("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        *("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    )
    NORMS = ("attention_norm", "ffn_norm")
    ACTIVATIONS = _GATED


class Fp8ScaledEncoderLayer(Fp8Encoder):
    """Mixin for encoder layers with layer scale: InternVL's."""

    ORIGINALS = ("InternVLVisionLayer",)
    LINEARS = (
        *("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        *("attention.projection_layer", "mlp.fc1", "mlp.fc2"),
    )
    NORMS = ("layernorm_before", "layernorm_after")

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Map [B, T, hidden] to the same shape, as the original does."""
        scale_branches = (
            lambda delta: self.lambda_1 * self.attention.projection_dropout(delta),
            lambda y: self.lambda_2 * self.dropout(y),
        )
        return _encode(self, hidden_states, scale_branches=scale_branches)


class Fp8VitEncoderLayer(Fp8Encoder):
    """Mixin for ViT's encoder layers, and base of the mixins for DINO's."""

    ORIGINALS = ("ViTLayer",)
    LINEARS: ClassVar[Sequence[str]] = (
        *("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        *("mlp.fc1", "mlp.fc2"),
    )
    NORMS = ("layernorm_before", "layernorm_after")

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map [B, T, hidden] to the same shape, as the original does.

        ``position_embeddings`` are cos and sin of the last tokens, the patches.
        """
        if position_embeddings is not None:
            cos, sin = position_embeddings
            prefix = (0, 0, hidden_states.shape[1] - len(cos), 0)  # tokens that are not rotated
            position_embeddings = (F.pad(cos, prefix, value=1.0), F.pad(sin, prefix))
        drop = self.drop_path if hasattr(self, "drop_path") else self.dropout
        scales = [getattr(self, f"layer_scale{number}", nn.Identity()) for number in (1, 2)]
        scale_branches = (lambda delta: drop(scales[0](delta)), lambda y: drop(scales[1](y)))
        return _encode(
            self, hidden_states, attention_mask, position_embeddings, scale_branches, **kwargs
        )


class Fp8Dino2EncoderLayer(Fp8VitEncoderLayer):
    """Mixin for DINOv2's encoder layers, with and without registers."""

    ORIGINALS = ("Dinov2Layer", "Dinov2WithRegistersLayer")
    NORMS = ("norm1", "norm2")


class Fp8Dino3EncoderLayer(Fp8Dino2EncoderLayer):
    """Mixin for DINOv3's encoder layers."""

    ORIGINALS = ("DINOv3ViTLayer",)
    LINEARS = (*Fp8VitEncoderLayer.LINEARS[:4], "mlp.up_proj", "mlp.down_proj")


class Fp8GatedDino3EncoderLayer(Fp8Dino3EncoderLayer):
    """Mixin for the encoder layers of DINOv3's large models."""

    LINEARS = (*Fp8VitEncoderLayer.LINEARS[:4], "mlp.gate_proj", *Fp8Dino3EncoderLayer.LINEARS[4:])
    ACTIVATIONS = _GATED


class Fp8GatedDino2EncoderLayer(Fp8GatedDino3EncoderLayer):
    """Mixin for the encoder layers of DINOv2's giant model, whose MLP ignores ``hidden_act``."""

    ORIGINALS = Fp8Dino2EncoderLayer.ORIGINALS
    ACTIVATIONS = dict.fromkeys(_GELUS, "silu_mul")


class Fp8PackedEncoderLayer(Fp8Encoder):
    """Mixin for encoder layers of images packed into one row, of Qwen3-VL and Qwen3.5."""

    ORIGINALS = ("Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock", "Qwen3_5VisionBlock")
    LINEARS: ClassVar[Sequence[str]] = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    NORMS = ("norm1", "norm2")

    def forward(
        self: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map [T, hidden] to the same shape, as the original does.

        ``cu_seqlens`` [N + 1] are the bounds of images or windows. Attention is computed by flash
        attention if the model is configured with one, otherwise by ``sdpa_packed``, not by one call
        per image or window as in the original.
        """
        config = self.attn.config
        flash = is_flash_attention_requested(config)
        own = flash and config._attn_implementation != PACKED_IMAGES
        longest = _find_longest(cu_seqlens) if max_seqlen is None else max_seqlen
        out = _encode(
            self,
            hidden_states[None],
            position_embeddings=position_embeddings,
            implementation=None if own else PACKED,
            **Packing(cu_seqlens.int(), longest).to_kwargs(),
            **kwargs,
        )
        return out[0]


class Fp8Qwen2EncoderLayer(Fp8PackedEncoderLayer):
    """Mixin for Qwen2-VL's encoder layers, which differ from Qwen3-VL's in names."""

    ORIGINALS = ("Qwen2VLVisionBlock",)
    LINEARS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


class Fp8GatedPackedEncoderLayer(Fp8PackedEncoderLayer):
    """Mixin for packed encoder layers with a gated MLP, of Qwen2.5-VL and GLM-V."""

    ORIGINALS = ("Qwen2_5_VLVisionBlock", "Glm4vVisionBlock")
    LINEARS = (*("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),)
    ACTIVATIONS = _GATED


FP8_LAYERS: tuple[type[Fp8Layer], ...] = (
    *(Fp8DecoderLayer, Fp8GemmaDecoderLayer, Fp8GlmDecoderLayer, Fp8ExpertsDecoderLayer),
    *(Fp8MlpLayer, Fp8GemmaMlpLayer, Fp8LfmMlpLayer),
    *(Fp8EncoderLayer, Fp8PixtralEncoderLayer, Fp8ScaledEncoderLayer),
    *(Fp8VitEncoderLayer, Fp8GatedDino2EncoderLayer, Fp8Dino2EncoderLayer),
    *(Fp8GatedDino3EncoderLayer, Fp8Dino3EncoderLayer),  # gated ones have the others' names as well
    *(Fp8PackedEncoderLayer, Fp8Qwen2EncoderLayer, Fp8GatedPackedEncoderLayer),
)


def find_layer(block: nn.Module) -> type[Fp8Layer] | None:
    """Return the mixin of a block of transformers; None if its class or a layer is not known."""
    of_class = [layer for layer in FP8_LAYERS if type(block).__name__ in layer.ORIGINALS]
    names = {name for name, _ in block.named_modules()} if of_class else set()
    return next((layer for layer in of_class if names.issuperset(layer.LINEARS)), None)


def activation_of(module: Any) -> str:
    """Return transformers' name of the activation of the block of an attention or MLP module."""
    config = getattr(module, "config", None)  # LFM2's MLP has none
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")


def _encode(
    block: Any,
    x: Tensor,
    mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale_branches: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run an encoder layer on the residual stream x [B, T, hidden].

    ``scale_branches`` are applied to the outputs of attention and MLP before they are added.
    """
    # LINEARS is in the order of use: heads, the output projection, the MLP's first layers, its last
    names = block.LINEARS
    attention = block.get_submodule(names[0].rpartition(".")[0])
    number = 1 if hasattr(attention, "qkv") else 3
    out, *into, last = (block.get_submodule(name) for name in names[number:])
    kwargs["scaling"] = getattr(attention, "scaling", None) or attention.scale
    dropout = getattr(attention, "attention_dropout", None) or getattr(attention, "dropout", 0.0)
    dropout = dropout if attention.training else 0.0
    recompute = block.fp8_recompute_qkv and not dropout  # backward cannot repeat dropout
    first, second = (getattr(block, name) for name in block.NORMS)
    heads, source, residual = norm_heads(
        x, first, attention, block.fp8_group_size, recompute, position_embeddings
    )
    delta = attention_output(
        attention, heads, mask, out, source, dropout=dropout, is_causal=False, **kwargs
    )
    del heads, source  # frees memory before the MLP
    if scale_branches is not None:
        delta = scale_branches[0](delta)
    y, residual = norm_mlp(
        residual,
        second,
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
