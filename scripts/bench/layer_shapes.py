"""The measured layers: one block of a known model, with random BF16 weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, SiglipVisionConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One block and its input."""

    name: str
    family: str
    """``llama``, ``qwen2`` or ``siglip``."""
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    batch: int
    length: int
    """Tokens of a sequence, or patches of an image."""

    @property
    def tokens(self) -> int:
        """Tokens of the input."""
        return self.batch * self.length


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape("llama-2-7b", "llama", 4096, 11008, 32, 32, 8, 2048),
        LayerShape("qwen2.5-7b", "qwen2", 3584, 18944, 28, 4, 4, 2048),
        LayerShape("siglip-so400m", "siglip", 1152, 4304, 16, 16, 64, 729),
    )
}
"""The blocks of Llama-2-7B, Qwen2.5-7B and SigLIP-so400m/14 at 384 pixels."""


def find_shape(name: str, batch: int | None = None, length: int | None = None) -> LayerShape:
    """Return a shape of :data:`SHAPES`, with another batch or length if given."""
    shape = SHAPES[name]
    return replace(shape, batch=batch or shape.batch, length=length or shape.length)


def build_layer(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the block of transformers with weights N(0, 0.02^2), as in pretraining; seed 0."""
    config, block = _build_config(shape), _CLASSES[shape.family][0]
    config._attn_implementation = "sdpa"
    with device:
        layer = block(config) if shape.family == "siglip" else block(config, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return layer.to(dtype).train()


def build_forward(shape: LayerShape, layer: nn.Module, device: torch.device) -> Forward:
    """Return ``hidden_states [batch, length, hidden] -> same shape``, causal for decoders."""
    rotary = _CLASSES[shape.family][1]
    if rotary is None:
        return lambda x: layer(x, attention_mask=None)
    positions = torch.arange(shape.length, device=device)[None]
    example = torch.empty(0, dtype=next(layer.parameters()).dtype, device=device)
    embeddings = rotary(_build_config(shape)).to(device)(example, positions)
    # Without a mask SDPA is causal, as in training on full sequences.
    return lambda x: layer(x, position_embeddings=embeddings)


_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": (Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "siglip": (SiglipEncoderLayer, None),
}
"""Family -> block and rotary embedding."""


def _build_config(shape: LayerShape) -> Any:
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
    }
    if shape.family == "siglip":
        return SiglipVisionConfig(**common)
    common |= {
        "num_key_value_heads": shape.key_value_heads,
        "max_position_embeddings": shape.length,
    }
    return AutoConfig.for_model(shape.family, **common)
