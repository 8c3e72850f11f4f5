"""A tiny composed model in a folder, for tests of exports."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from coat_vlm.config import ImageConfig
from coat_vlm.model import build_model
from coat_vlm.model.processor import CoatVlmProcessor, train_tokenizer

QUESTION = "What is in the image?"
SIDE = 28


def saved(
    tiny: Any,
    folder: Path,
    projector: str = "mlp2x_gelu",
    template: str = "chatml",
    image: dict[str, Any] | None = None,
    **parts: Any,
) -> Path:
    """Save a model with weights large enough to matter, and its processor."""
    tokenizer = train_tokenizer([QUESTION, "A red circle."] * 5, 320)
    images = ImageConfig(**image or {})
    recipe = dataclasses.replace(tiny.recipe(projector=projector, **parts), image=images)
    torch.manual_seed(0)
    model = build_model(recipe, tokenizer).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    processor = CoatVlmProcessor(
        tokenizer,
        image_size=SIDE,
        image_mean=(0.3, 0.5, 0.6),
        image_std=(0.4, 0.5, 0.6),
        image_mode=images.mode,
        image_max_tiles=images.max_tiles or 12,
        image_s2_scales=images.s2_scales,
        tokens_per_image=model.config.tokens_per_image,
        template=template,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
