"""The vision tower: SigLIP and CLIP of transformers, ViT towers of open_clip, behind one interface.

A tower is cut at ``select_layer``: the blocks after it, the final norm and the pooling head are
not built. They would cost memory and time and, worse, be trainable parameters that never get a
gradient. The cut tower's last output therefore *is* hidden state ``select_layer``. transformers
returns as ``hidden_states[-1]`` of SigLIP and CLIP the last block's output before
``post_layernorm``, and VILA and LLaVA index these; ``select_layer`` means the same here for every
library.
"""

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PretrainedConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from coat_vlm.model.configuration import CoatVlmConfig, OpenClipVisionConfig, kept_layers
from coat_vlm.model.open_clip_tower import OpenClipBackbone, rebuild_open_clip


class VisionTower(nn.Module):
    """Images to patch features: hidden state ``select_layer`` of a vision transformer.

    Args:
        config: the composed configuration; its ``vision_config`` describes the complete tower.
        model: a complete tower to cut (with pretrained weights, say), built from the configuration
            when absent. It is changed in place.

    Attributes:
        hidden_size: width C of the features.
        image_size: side S of the square input in pixels.
        patch_size: side of a patch in pixels.
        num_patches: features P per image, with class and register tokens where they are kept.
    """

    def __init__(self, config: CoatVlmConfig, model: nn.Module | None = None) -> None:
        super().__init__()
        vision = config.vision_config
        self.model = model if model is not None else _build(vision)
        _cut(self.model, kept_layers(vision.num_hidden_layers, config.select_layer))
        keep_prefix = config.select_feature == "cls_patch"
        self._skipped_tokens = 0 if keep_prefix else config.num_prefix_tokens
        self.hidden_size: int = vision.hidden_size
        self.image_size: int = vision.image_size
        self.patch_size: int = vision.patch_size
        grid = self.image_size // self.patch_size
        self.num_patches = grid * grid + (config.num_prefix_tokens if keep_prefix else 0)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Features of images.

        Args:
            pixel_values: (N, 3, S, S), normalised for the tower; cast to its dtype.

        Returns:
            (N, P, C) in the tower's dtype; patches in row-major order.

        Raises:
            ValueError: the images have another shape.
        """
        size = self.image_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, size, size):
            raise ValueError(
                f"pixel_values have shape {tuple(pixel_values.shape)}, the tower takes "
                f"(N, 3, {size}, {size}); resize the images as the processor does"
            )
        pixel_values = pixel_values.to(next(self.model.parameters()).dtype)
        if isinstance(self.model, OpenClipBackbone):
            tokens = self.model(pixel_values)
        else:
            tokens = self.model(pixel_values).last_hidden_state
        return tokens[:, self._skipped_tokens :]


def _build(config: PretrainedConfig) -> nn.Module:
    if isinstance(config, OpenClipVisionConfig):
        return rebuild_open_clip(config)
    if isinstance(config, SiglipVisionConfig):
        return SiglipVisionModel._from_config(config)
    if isinstance(config, CLIPVisionConfig):
        return CLIPVisionModel._from_config(config)
    raise ValueError(
        f"vision_config has model_type {config.model_type!r}; allowed: siglip_vision_model, "
        f"clip_vision_model, {OpenClipVisionConfig.model_type}"
    )


def _cut(model: nn.Module, num_layers: int) -> None:
    """Remove everything after block ``num_layers``, in place."""
    if isinstance(model, OpenClipBackbone):
        model.trim(num_layers)
        return
    assert isinstance(model, SiglipVisionModel | CLIPVisionModel)
    model.encoder.layers = model.encoder.layers[:num_layers]
    setattr(model, "post_layernorm", nn.Identity())  # noqa: B010 - declared as a LayerNorm
    if isinstance(model, SiglipVisionModel) and model.use_head:
        model.use_head = False
        del model.head
