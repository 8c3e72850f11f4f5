"""The models of ``coat-vlm bench step``, and what they are trained on.

Weights are random and batches are noise: neither the time nor the memory of a step depends on them.
A sample has a fixed number of tokens, some of which are those of its images. A language model alone
has text alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, SiglipVisionConfig

from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.build import frame_of
from coat_vlm.model.loss import IGNORE_INDEX

Inputs = dict[str, Tensor]
"""``input_ids`` and ``labels`` [B, T]; with a tower ``pixel_values`` [B * images, 3, S, S] and
``image_positions`` [B * tokens of images]. Labels are on the CPU, where training leaves them."""


@dataclass(frozen=True, slots=True)
class VlmShape:
    """A model and its samples."""

    name: str
    vision: Mapping[str, Any] | None
    """Of ``SiglipVisionConfig``; the last block is cut off, as in training (select_layer -2). None
    for a language model alone."""
    language: Mapping[str, Any]
    """Of ``Qwen2Config``, or of the ``family``'s."""
    tokens: int
    """Of a sample, those of images included."""
    images: int
    """Of a sample."""
    family: str = "qwen2"
    """Of the language model: a key of :data:`FAMILIES`."""

    def config(self, dtype: torch.dtype) -> CoatVlmConfig:
        """The composed configuration; the last id of the vocabulary stands for an image."""
        language = FAMILIES[self.family](**self.language)
        language.dtype = dtype
        if self.vision is None:
            return CoatVlmConfig(
                text_config=language,
                projector_type=None,
                image_token_id=None,
                attn_implementation="sdpa",
            )
        vision = SiglipVisionConfig(**self.vision)
        vision.dtype = dtype
        return CoatVlmConfig(
            vision_config=vision,
            text_config=language,
            image_token_id=language.vocab_size - 1,
            attn_implementation="sdpa",
        )

    def build(self, device: torch.device, dtype: torch.dtype) -> CoatVlm:
        """The model with random weights, the same at every call on the same kind of device."""
        return random_model(self.config(dtype), device, dtype)

    def frame(self, dtype: torch.dtype) -> CoatVlm:
        """The model on ``meta``."""
        return frame_of(self.config(dtype), dtype)

    def sample(self, number: int, device: torch.device) -> Inputs:
        """Sample ``number`` alone; see :meth:`batch`."""
        return self.batch(number, 1, device)

    def batch(self, first: int, count: int, device: torch.device) -> Inputs:
        """Samples ``first`` to ``first + count - 1``, the same for the same number.

        Each is images, if there is a tower, and then random text, all of which is trained.

        Args:
            first: number of the first sample.
            count: how many.
            device: where they go, but for the labels.
        """
        samples = [self._drawn(first + number) for number in range(count)]
        inputs = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        if self.vision is not None:
            last = self.language["vocab_size"] - 1
            inputs["image_positions"] = (inputs["input_ids"] == last).flatten().nonzero().squeeze(1)
        labels = inputs.pop("labels")
        return {name: tensor.to(device) for name, tensor in inputs.items()} | {"labels": labels}

    def _drawn(self, number: int) -> Inputs:
        """One sample on the CPU."""
        generator = torch.Generator().manual_seed(1000 + number)
        config = self.config(torch.float32)
        last = self.language["vocab_size"] - 1
        ids = torch.randint(last, (1, self.tokens), generator=generator)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        if self.vision is not None:
            of_images = self.images * config.tokens_per_image
            ids[:, :of_images] = last
            inputs["labels"][:, :of_images] = IGNORE_INDEX
            size = self.vision["image_size"]
            inputs["pixel_values"] = torch.randn(self.images, 3, size, size, generator=generator)
        return inputs


def random_model(
    config: CoatVlmConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> CoatVlm:
    """A composed model with random weights, the same at every call on the same kind of device.

    They are drawn where the model will be: 8B parameters take seconds on a GPU, minutes on a CPU.

    Args:
        config: its parts' ``dtype`` is the same.
        device: where it stands.
        dtype: of all weights.
        seed: of torch's global generator.
    """
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return CoatVlm(config)
    finally:
        torch.set_default_dtype(before)


FAMILIES: dict[str, type[LlamaConfig] | type[Qwen2Config]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
}
"""Configurations of language models by transformers' model type."""

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
    "tiny-llm": VlmShape(
        "tiny-llm",
        None,
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
        },
        tokens=32,
        images=0,
        family="llama",
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
    "2b": VlmShape(
        "siglip-so400m_qwen2.5-1.5b",
        _SO400M,
        {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
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
    "llama-2-7b": VlmShape(
        "llama-2-7b",
        None,
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        tokens=2048,
        images=0,
        family="llama",
    ),
}  # fmt: skip
"""By the names of ``--size``. The language models are published shapes (config.json of
Qwen/Qwen2.5-0.5B, -1.5B and -7B, and meta-llama/Llama-2-7b-hf); Llama-2-7B at a context of 2,048
is the end-to-end setting of COAT's paper (arXiv:2410.19313)."""
