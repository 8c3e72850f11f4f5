"""The vision-language models of ``coat-vlm bench step``, and what they are trained on.

Weights are random and batches are noise: neither the time nor the memory of a step depends on them.
A sample has a fixed number of tokens, some of which are those of its images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, SiglipVisionConfig

from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.frame import frame_of
from coat_vlm.model.loss import IGNORE_INDEX

Inputs = dict[str, Tensor]
"""``input_ids`` and ``labels`` [B, T], ``pixel_values`` [B * images, 3, S, S]."""


@dataclass(frozen=True, slots=True)
class VlmShape:
    """A model and its samples."""

    name: str
    vision: Mapping[str, Any]
    """Of ``SiglipVisionConfig``; the last block is cut off, as in training (select_layer -2)."""
    language: Mapping[str, Any]
    """Of ``Qwen2Config``."""
    tokens: int
    """Of a sample, those of images included."""
    images: int
    """Of a sample."""

    def config(self, dtype: torch.dtype) -> CoatVlmConfig:
        """The composed configuration; the last id of the vocabulary stands for an image."""
        vision = SiglipVisionConfig(**self.vision)
        language = Qwen2Config(**self.language)
        vision.dtype = language.dtype = dtype
        return CoatVlmConfig(
            vision_config=vision,
            text_config=language,
            image_token_id=language.vocab_size - 1,
            attn_implementation="sdpa",
        )

    def build(self, device: torch.device, dtype: torch.dtype) -> CoatVlm:
        """The model with random weights, the same at every call on the same kind of device.

        They are drawn where the model will be: 8B parameters take seconds on a GPU, minutes on a
        CPU.
        """
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with device:
                return CoatVlm(self.config(dtype))
        finally:
            torch.set_default_dtype(before)

    def frame(self, dtype: torch.dtype) -> CoatVlm:
        """The model on ``meta``."""
        return frame_of(self.config(dtype), dtype)

    def sample(self, number: int, device: torch.device) -> Inputs:
        """One sample: images, then random text, all of which is trained.

        Args:
            number: which one; the same number gives the same sample.
            device: where it goes.
        """
        generator = torch.Generator().manual_seed(1000 + number)
        config = self.config(torch.float32)
        size = self.vision["image_size"]
        ids = torch.randint(config.image_token_id, (1, self.tokens), generator=generator)
        of_images = self.images * config.tokens_per_image
        ids[:, :of_images] = config.image_token_id
        labels = ids.masked_fill(ids == config.image_token_id, IGNORE_INDEX)
        pixels = torch.randn(self.images, 3, size, size, generator=generator)
        inputs = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def batch(self, first: int, count: int, device: torch.device) -> Inputs:
        """Samples ``first`` to ``first + count - 1`` in one batch."""
        samples = [self.sample(first + number, device) for number in range(count)]
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
"""SigLIP-so400m/14 at 448 pixels: 1,024 patches, of which the projector makes 256 tokens."""

SIZES = {
    "tiny": VlmShape(
        "tiny",
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
        },
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 64, "tie_word_embeddings": False,
        },
        tokens=32,
        images=2,
    ),
    "1b": VlmShape(
        "siglip-so400m_qwen2.5-0.5b",
        _SO400M,
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        },
        tokens=4096,
        images=4,
    ),
    "8b": VlmShape(
        "siglip-so400m_qwen2.5-7b",
        _SO400M,
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        },
        tokens=4096,
        images=4,
    ),
}  # fmt: skip
"""By the names of ``--size``. The language models are Qwen2.5's published shapes (config.json of
Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-7B)."""
