"""Small models of every family that FP8 knows, and the passes of their first block."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
    SiglipVisionModel,
)

TOKENS = 64
DECODERS = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 64}),
}
ENCODERS = {
    "siglip": (SiglipVisionConfig, SiglipVisionModel, "gelu_pytorch_tanh"),
    "siglip_erf": (SiglipVisionConfig, SiglipVisionModel, "gelu"),
    "clip": (CLIPVisionConfig, CLIPVisionModel, "quick_gelu"),
}


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
    config_class, model_class, activation = ENCODERS[kind]
    config = config_class(
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        hidden_act=activation,
        **changes,
    )
    return randomized(model_class(config))


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
    if hasattr(model, "model"):
        block = model.model.layers[0]
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = model.model.rotary_emb(x, positions)
        mask = None
        y = block(x, attention_mask=mask, position_embeddings=embeddings)
    else:
        block = model.encoder.layers[0]
        y = block(x, None)
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
