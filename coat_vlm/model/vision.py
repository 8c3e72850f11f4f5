"""The vision tower: SigLIP and CLIP of transformers, ViT towers of open_clip, behind one interface.

A tower is cut at ``select_layer``: the blocks after it, the final norm and the pooling head are
not built. They would cost memory and time and, worse, be trainable parameters that never get a
gradient. The cut tower's last output therefore *is* hidden state ``select_layer``. transformers
returns as ``hidden_states[-1]`` of SigLIP and CLIP the last block's output before
``post_layernorm``, and VILA and LLaVA index these; ``select_layer`` means the same here for every
library.

Of open_clip two kinds are taken, built from its configuration or loaded by name, folder or Hub id:
its own ViT (the CLIP towers) and timm's ViT (the SigLIP towers). It is imported when a tower is
built, not before: that takes a second.
"""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

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
        visual = _build_visual(dict(config.vision_cfg or {}), config.quick_gelu)
        return OpenClipBackbone(visual)
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


class OpenClipBackbone(nn.Module):
    """An open_clip image tower whose forward returns the last block's tokens, before any norm.

    Final norm, pooling and projection are removed: nothing here uses them, and a trainable
    parameter without gradient would be a trap. ``trim`` removes trailing blocks.

    Args:
        visual: open_clip's ``VisionTransformer``, or its ``TimmModel`` around timm's.

    Raises:
        ValueError: the tower is of another architecture.
    """

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = _token_model(visual)
        # open_clip has initialised them; transformers must not do it again, its own way.
        for module in self.visual.modules():
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]

    def trim(self, num_layers: int) -> None:
        """Keep the first ``num_layers`` blocks."""
        model: Any = self.visual
        if _is_timm(model):
            model.blocks = model.blocks[:num_layers]
        else:
            model.transformer.resblocks = model.transformer.resblocks[:num_layers]

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Tokens (N, prefix + patches, C) of images (N, 3, S, S)."""
        return self.visual(pixel_values)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the blocks recompute activations; transformers' switch sets it by this name."""
        if _is_timm(self.visual):
            return bool(self.visual.grad_checkpointing)
        return bool(self.visual.transformer.grad_checkpointing)  # pyright: ignore[reportAttributeAccessIssue]

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.visual.set_grad_checkpointing(enable)  # pyright: ignore[reportCallIssue]


def build_open_clip(
    model_config: Mapping[str, Any],
) -> tuple[OpenClipVisionConfig, OpenClipBackbone]:
    """A tower with random weights.

    Args:
        model_config: open_clip's model configuration (``vision_cfg``, ``quick_gelu``; the rest is
            ignored), or ``{"model_name": NAME}`` for one of open_clip's own.

    Raises:
        ValueError: the name or a key is unknown, or the architecture is not a ViT.
    """
    from open_clip import get_model_config

    if "model_name" in model_config:
        name = model_config["model_name"]
        known = get_model_config(name)
        if known is None:
            raise ValueError(_unknown_name(name))
        model_config = known
    if "vision_cfg" not in model_config:
        raise ValueError(
            "model.vision.config of an open_clip tower needs vision_cfg or model_name, got "
            f"{sorted(model_config)}"
        )
    vision_cfg = dict(model_config["vision_cfg"])
    quick_gelu = bool(model_config.get("quick_gelu", False))
    return _describe(_build_visual(vision_cfg, quick_gelu), vision_cfg, quick_gelu)


def load_open_clip(name_or_path: str) -> tuple[OpenClipVisionConfig, OpenClipBackbone]:
    """A tower with its pretrained weights.

    Args:
        name_or_path: a folder with open_clip_config.json and weights; a Hub id of such a folder,
            with or without ``hf-hub:``; ``NAME/TAG`` of open_clip's list; or ``NAME`` alone where
            it has exactly one tag.

    Raises:
        ValueError: nothing is found there, the weights do not fit, or the tower is not a ViT.
    """
    import open_clip

    name, tag = _resolve(name_or_path)
    tag_config: Any = open_clip.get_pretrained_cfg(name, tag) if tag else {}
    quick_gelu = bool(tag_config.get("quick_gelu", False))
    try:
        model_config: Any = open_clip.get_model_config(name)
        model: Any = open_clip.create_model(
            name,
            pretrained=tag,
            force_quick_gelu=quick_gelu,
            force_patch_dropout=0.0,
            pretrained_text=False,
            require_pretrained=True,
            weights_only=True,
        )
    # open_clip raises RuntimeError for everything from a failed download to misfitting weights.
    except (OSError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
        raise ValueError(
            f"model.vision.name_or_path={name_or_path!r}: open_clip cannot load it: {error}; "
            "needed is a folder with open_clip_config.json and matching weights, a Hub id of one, "
            "or a name and tag of open_clip.list_pretrained()"
        ) from error
    vision_cfg = dict(model_config["vision_cfg"])
    quick_gelu = quick_gelu or bool(model_config.get("quick_gelu", False))
    config, backbone = _describe(model.visual, vision_cfg, quick_gelu)
    preprocessing = open_clip.get_model_preprocess_cfg(model)
    config.image_mean = list(preprocessing["mean"])
    config.image_std = list(preprocessing["std"])
    return config, backbone


def _resolve(name_or_path: str) -> tuple[str, str | None]:
    """open_clip's model name and weight tag of a user's name."""
    from open_clip import list_models, list_pretrained_tags_by_model

    if Path(name_or_path).is_dir():
        return f"local-dir:{name_or_path}", None
    name, _, tag = name_or_path.partition("/")
    if name not in list_models():
        hub = name_or_path.startswith("hf-hub:")
        if "/" not in name_or_path:
            raise ValueError(_unknown_name(name_or_path))
        return name_or_path if hub else f"hf-hub:{name_or_path}", None
    tags = list_pretrained_tags_by_model(name)
    if not tag and len(tags) == 1:
        return name, tags[0]
    if tag not in tags:
        raise ValueError(
            f"model.vision.name_or_path={name_or_path!r} does not say which weights; "
            f"allowed: {', '.join(f'{name}/{known}' for known in tags) or 'none'}; for random "
            f"weights set model.vision.config to {{model_name: {name}}} instead"
        )
    return name, tag


def _unknown_name(name: str) -> str:
    from difflib import get_close_matches

    from open_clip import list_models

    close = ", ".join(get_close_matches(name, list_models(), n=3)) or "see open_clip.list_models()"
    return (
        f"open_clip knows no model {name!r}, and it is no folder or Hub id (org/repo); "
        f"perhaps: {close}"
    )


def _build_visual(vision_cfg: dict[str, Any], quick_gelu: bool) -> nn.Module:
    from open_clip import CLIPVisionCfg
    from open_clip.model import _build_vision_tower

    # Patch dropout would change the number of tokens; timm's own weights have no place here.
    vision_cfg = vision_cfg | {"patch_dropout": 0.0, "timm_model_pretrained": False}
    try:
        cfg = CLIPVisionCfg(**vision_cfg)
    except TypeError as error:
        allowed = ", ".join(CLIPVisionCfg.__dataclass_fields__)
        raise ValueError(f"open_clip's vision_cfg: {error}; allowed keys: {allowed}") from error
    # The projection to open_clip's embedding is removed, so its width does not matter.
    visual = _build_vision_tower(1, cfg, quick_gelu)
    trunk = getattr(visual, "trunk", None)
    size = (cfg.image_size, cfg.image_size) if isinstance(cfg.image_size, int) else cfg.image_size
    # timm builds the size of the model's name; open_clip notes the wanted one and does nothing.
    if _is_timm(trunk) and tuple(trunk.patch_embed.img_size) != tuple(size):  # pyright: ignore
        trunk.set_input_size(tuple(size))  # pyright: ignore
    return visual


def _token_model(visual: nn.Module) -> nn.Module:
    """The tower, changed in place so that its forward returns all tokens of the last block."""
    from open_clip.transformer import VisionTransformer

    trunk = getattr(visual, "trunk", None)
    if _is_timm(trunk):
        trunk.prune_intermediate_layers([len(trunk.blocks) - 1], prune_norm=True, prune_head=True)  # pyright: ignore
        return trunk  # pyright: ignore[reportReturnType]
    if not isinstance(visual, VisionTransformer):
        kind = type(trunk if isinstance(trunk, nn.Module) else visual).__name__
        raise ValueError(
            f"open_clip tower of class {kind} has no sequence of patches and blocks to select "
            "from; allowed: ViT towers (open_clip's VisionTransformer, timm's VisionTransformer)"
        )
    visual.ln_post = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    visual.proj = None
    visual.attn_pool = None
    visual.attn_pool_contrastive = None
    visual.pool_type = "none"
    visual.output_tokens = False
    return visual


def _is_timm(module: object) -> bool:
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(module, VisionTransformer)


def _describe(
    visual: nn.Module, vision_cfg: dict[str, Any], quick_gelu: bool
) -> tuple[OpenClipVisionConfig, OpenClipBackbone]:
    backbone = OpenClipBackbone(visual)
    model: Any = backbone.visual
    timm = _is_timm(model)
    image_size = model.patch_embed.img_size if timm else model.image_size
    patch_size = model.patch_embed.patch_size if timm else model.patch_size
    if image_size[0] != image_size[1] or patch_size[0] != patch_size[1]:
        raise ValueError(
            f"images {image_size} in patches {patch_size} are not square; choose a square tower"
        )
    config = OpenClipVisionConfig(
        vision_cfg=vision_cfg | {"image_size": image_size[0]},
        quick_gelu=quick_gelu,
        hidden_size=model.embed_dim if timm else model.transformer.width,
        image_size=image_size[0],
        patch_size=patch_size[0],
        num_hidden_layers=len(model.blocks if timm else model.transformer.resblocks),
        num_prefix_tokens=model.num_prefix_tokens if timm else 1,
    )
    return config, backbone
