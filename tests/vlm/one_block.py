"""Small models of every family that FP8 supports, and the passes of their first block."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

TOKENS = 64
DECODERS = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 64}),
}
LARGE: dict[str, Any] = {"initializer_range": 0.06}
REGISTERS = LARGE | {"num_register_tokens": 4}
DINO3 = REGISTERS | {"pos_embed_rescale": None}  # in training it draws a scale of the positions
ENCODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "siglip": (SiglipVisionConfig, SiglipVisionModel, {"hidden_act": "gelu_pytorch_tanh"}),
    "siglip_erf": (SiglipVisionConfig, SiglipVisionModel, {"hidden_act": "gelu"}),
    "clip": (CLIPVisionConfig, CLIPVisionModel, {"hidden_act": "quick_gelu"}),
    "vit": (ViTConfig, ViTModel, LARGE),
    "dinov2": (Dinov2Config, Dinov2Model, LARGE),
    "dinov2_registers": (Dinov2WithRegistersConfig, Dinov2WithRegistersModel, REGISTERS),
    "dinov2_giant": (Dinov2Config, Dinov2Model, LARGE | {"use_swiglu_ffn": True}),
    "dinov3": (DINOv3ViTConfig, DINOv3ViTModel, DINO3),
    "dinov3_7b": (
        DINOv3ViTConfig, DINOv3ViTModel, DINO3 | {"use_gated_mlp": True, "hidden_act": "silu"},
    ),
}  # fmt: skip


def decoder(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config_class, extra = DECODERS[kind]
    settings: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 768,
        "vocab_size": 512,
        "initializer_range": 0.06,
    }
    config = config_class(**{**settings, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return randomized(model)


def encoder(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config_class, model_class, settings = ENCODERS[kind]
    sizes: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"image_size": 64, "patch_size": 8}
    if not kind.startswith("dinov2"):
        sizes["intermediate_size"] = 768
    return randomized(model_class(config_class(**sizes | settings | changes)))


def first_block(model: Any) -> Any:
    for name in ("model.layers", "encoder.layers", "encoder.layer", "model.layer", "layers"):
        with contextlib.suppress(AttributeError):
            return model.get_submodule(name)[0]
    raise AssertionError


def randomized(model: Any) -> Any:
    """Biases and norm weights away from 0 and 1, so that ignoring one shows."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model


def run_block(model: Any, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and parameter gradients of a model's first block."""
    x = x.clone().requires_grad_()
    block, mask = first_block(model), None
    if hasattr(model, "lm_head"):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = model.model.rotary_emb(x, positions)
        y = block(x, attention_mask=mask, position_embeddings=embeddings)
    elif hasattr(model, "rope_embeddings"):
        embeddings = model.rope_embeddings(x.new_zeros(1, 3, 64, 64))
        # The first tokens are no patches.
        y = block(x, position_embeddings=tuple(one[5:] for one in embeddings))
    else:
        y = block(x, mask)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    assert x.grad is not None
    gradients = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    return y.detach(), x.grad, gradients


def inputs(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, TOKENS, model.config.hidden_size, generator=generator)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())
