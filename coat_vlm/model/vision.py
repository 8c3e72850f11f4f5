"""The vision tower: one interface to transformers' and open_clip's ViT towers.

The blocks after hidden state ``select_layer``, the final norm and the pooling head are not built,
as they would be parameters without gradients. open_clip is imported only to build a tower, because
the import takes a second.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionModel,
    Dinov2Model,
    Dinov2WithRegistersModel,
    DINOv3ViTModel,
    SiglipVisionModel,
    ViTModel,
)
from transformers.image_processing_base import ImageProcessingMixin

from coat_vlm.model.configuration import CoatVlmConfig, OpenClipVisionConfig, count_needed_layers

VISION_MODELS: dict[str, Any] = {
    "siglip_vision_model": SiglipVisionModel,
    "clip_vision_model": CLIPVisionModel,
    "dinov2": Dinov2Model,
    "dinov2_with_registers": Dinov2WithRegistersModel,
    "dinov3_vit": DINOv3ViTModel,
    "vit": ViTModel,
}
"""transformers' towers by model type; ``siglip`` and ``clip`` checkpoints contain one."""
CONTRASTIVE = ("siglip_vision_model", "clip_vision_model")
"""Types that published checkpoints of LLaVA and VILA have."""


class VisionTower(nn.Module):
    """Vision transformer that maps images to hidden state ``select_layer``.

    ``model`` is a complete tower, which is truncated in place; built from ``config`` by default.
    """

    def __init__(self, config: CoatVlmConfig, model: nn.Module | None = None) -> None:
        super().__init__()
        vision = config.vision_config
        if model is None and isinstance(vision, OpenClipVisionConfig):
            visual = _build_visual(vision.vision_cfg or {}, vision.quick_gelu)
            model = OpenClipBackbone(visual)
        elif model is None:
            model = VISION_MODELS[vision.model_type]._from_config(vision)
        assert model is not None
        self.model: nn.Module = model
        layers = count_needed_layers(vision.num_hidden_layers, config.select_layer)
        if isinstance(model, OpenClipBackbone):
            model.truncate(layers)
        else:
            _truncate(model, layers)
        keeps_prefix = config.select_feature == "cls_patch"
        self._skipped_tokens = 0 if keeps_prefix else config.num_prefix_tokens
        self.image_size: int = vision.image_size

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Compute the features (N, P, C) of normalized images (N, 3, S, S), P in row-major order.

        Raises ValueError for another shape.
        """
        size = self.image_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, size, size):
            raise ValueError(
                f"pixel_values have shape {tuple(pixel_values.shape)}, the tower requires "
                f"(N, 3, {size}, {size}); resize the images as the processor does"
            )
        pixel_values = pixel_values.to(next(self.model.parameters()).dtype)
        if isinstance(self.model, OpenClipBackbone):
            tokens = self.model(pixel_values)
        else:
            tokens = self.model(pixel_values).last_hidden_state
        return tokens[:, self._skipped_tokens :]


def _truncate(model: Any, num_layers: int) -> None:
    """Remove what hidden state ``num_layers`` does not need."""
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    del blocks[num_layers:]
    for norm in {"post_layernorm", "layernorm", "norm"} & model._modules.keys():
        setattr(model, norm, nn.Identity())
    if isinstance(model, SiglipVisionModel) and model.use_head:
        model.use_head = False
        del model.head
    for owner, name in ((model, "pooler"), (model.embeddings, "mask_token")):
        if hasattr(owner, name):
            setattr(owner, name, None)


def use_processor_size(config: Any, path: str) -> None:
    """Set ``image_size`` to the side that a checkpoint's image processor gives images.

    DINOv2 was last trained with 518 pixels, and its image processor crops to 224.
    """
    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(path)
    except OSError:  # build_processor warns
        return
    size = found.get("crop_size" if found.get("do_center_crop") else "size")
    sides = set(size.values() if isinstance(size, dict) else (size,)) - {None}
    if len(sides) == 1:
        config.image_size = sides.pop()


@torch.no_grad()
def resize_positions(model: Any, image_size: int) -> None:
    """Interpolate position embeddings once, as the tower does in each pass, for another size."""
    config, embeddings = model.config, model.embeddings
    if config.image_size != image_size and hasattr(embeddings, "position_embeddings"):
        tokens = (image_size // config.patch_size) ** 2 + 1
        like = embeddings.position_embeddings.new_empty(1, tokens, config.hidden_size)
        resized = embeddings.interpolate_pos_encoding(like, image_size, image_size)
        embeddings.position_embeddings = nn.Parameter(resized.contiguous())
        embeddings.image_size = (image_size, image_size)
    config.image_size = image_size


class OpenClipBackbone(nn.Module):
    """open_clip's ``VisionTransformer``, or timm's in its ``TimmModel``; ValueError for others.

    Its forward returns the last block's tokens, before the final norm.
    """

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = _token_model(visual)
        # open_clip has initialized the modules; transformers must not initialize them again.
        for module in self.visual.modules():
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]

    def truncate(self, num_layers: int) -> None:
        """Keep the first ``num_layers`` blocks."""
        model: Any = self.visual
        if _is_timm(model):
            model.blocks = model.blocks[:num_layers]
        else:
            model.transformer.resblocks = model.transformer.resblocks[:num_layers]

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Compute the tokens (N, prefix + patches, C) of images (N, 3, S, S)."""
        return self.visual(pixel_values)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the blocks recompute activations; transformers sets this attribute."""
        if _is_timm(self.visual):
            return bool(self.visual.grad_checkpointing)
        return bool(self.visual.transformer.grad_checkpointing)  # pyright: ignore[reportAttributeAccessIssue]

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.visual.set_grad_checkpointing(enable)  # pyright: ignore[reportCallIssue]


def build_open_clip(
    model_config: Mapping[str, Any],
) -> tuple[OpenClipVisionConfig, OpenClipBackbone]:
    """Build a random tower from open_clip's model configuration or ``{"model_name": NAME}``."""
    from open_clip import get_model_config, list_models

    if "model_name" in model_config:
        name = model_config["model_name"]
        known = get_model_config(name)
        if known is None:
            close = get_close_matches(name, list_models(), n=3)
            hint = ", ".join(close) or "see open_clip.list_models()"
            raise ValueError(f"open_clip has no model {name!r}; did you mean: {hint}")
        model_config = known
    if "vision_cfg" not in model_config:
        raise ValueError(
            "model.vision.config of an open_clip tower needs vision_cfg or model_name, got "
            f"{sorted(model_config)}"
        )
    quick_gelu = bool(model_config.get("quick_gelu", False))
    return _describe(_build_visual(model_config["vision_cfg"], quick_gelu), model_config)


def load_open_clip(name_or_path: str) -> tuple[OpenClipVisionConfig, OpenClipBackbone]:
    """Load a pretrained tower from a folder with open_clip_config.json, or from the Hub.

    Raises ValueError if no model is found, the weights do not fit, or the tower is not a ViT.
    """
    import open_clip

    schema = "local-dir" if Path(name_or_path).is_dir() else "hf-hub"
    name = f"{schema}:{name_or_path}"
    try:
        model_config: Any = open_clip.get_model_config(name)
        model: Any = open_clip.create_model(
            name,
            force_patch_dropout=0.0,
            pretrained_text=False,
            require_pretrained=True,
            weights_only=True,
        )
    # open_clip raises RuntimeError for failed downloads, mismatched weights and other errors.
    except (OSError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
        raise ValueError(
            f"model.vision.name_or_path={name_or_path!r}: open_clip cannot load it: {error}; "
            "required: a folder with open_clip_config.json and matching weights, or the Hub id of "
            "one, such as timm/ViT-B-16-SigLIP"
        ) from error
    config, backbone = _describe(model.visual, model_config)
    preprocessing = open_clip.get_model_preprocess_cfg(model)
    config.image_mean = list(preprocessing["mean"])
    config.image_std = list(preprocessing["std"])
    return config, backbone


def _build_visual(vision_cfg: dict[str, Any], quick_gelu: bool) -> nn.Module:
    from open_clip import CLIPVisionCfg
    from open_clip.model import _build_vision_tower

    # Patch dropout would change the number of tokens; timm must not load its own weights.
    vision_cfg = vision_cfg | {"patch_dropout": 0.0, "timm_model_pretrained": False}
    try:
        cfg = CLIPVisionCfg(**vision_cfg)
    except TypeError as error:
        allowed = ", ".join(CLIPVisionCfg.__dataclass_fields__)
        raise ValueError(f"open_clip's vision_cfg: {error}; allowed keys: {allowed}") from error
    # The width of the projection is arbitrary, because the projection is removed.
    visual = _build_vision_tower(1, cfg, quick_gelu)
    trunk = getattr(visual, "trunk", None)
    size = (cfg.image_size, cfg.image_size) if isinstance(cfg.image_size, int) else cfg.image_size
    # timm builds the input size of the model's name; open_clip ignores the configured size.
    if _is_timm(trunk) and tuple(trunk.patch_embed.img_size) != tuple(size):  # pyright: ignore
        trunk.set_input_size(tuple(size))  # pyright: ignore
    return visual


def _token_model(visual: nn.Module) -> nn.Module:
    """Change the tower in place so that its forward returns all tokens of the last block."""
    from open_clip.transformer import VisionTransformer

    trunk = getattr(visual, "trunk", None)
    if _is_timm(trunk):
        trunk.prune_intermediate_layers([len(trunk.blocks) - 1], prune_norm=True, prune_head=True)  # pyright: ignore
        return trunk  # pyright: ignore[reportReturnType]
    if not isinstance(visual, VisionTransformer):
        kind = type(trunk if isinstance(trunk, nn.Module) else visual).__name__
        raise ValueError(
            f"open_clip tower of class {kind} has no sequence of patches and blocks; "
            "allowed: ViT towers (open_clip's VisionTransformer, timm's VisionTransformer)"
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
    visual: nn.Module, model_config: Mapping[str, Any]
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
        vision_cfg=model_config["vision_cfg"] | {"image_size": image_size[0]},
        quick_gelu=bool(model_config.get("quick_gelu", False)),
        hidden_size=model.embed_dim if timm else model.transformer.width,
        image_size=image_size[0],
        patch_size=patch_size[0],
        num_hidden_layers=len(model.blocks if timm else model.transformer.resblocks),
        num_prefix_tokens=model.num_prefix_tokens if timm else 1,
    )
    return config, backbone
