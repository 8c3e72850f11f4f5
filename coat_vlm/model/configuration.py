"""Configuration of the composed model, which contains the configurations of its parts."""

import os
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PretrainedConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from coat_vlm.model.projector import block_size, count_projected_tokens

IMAGE_TOKEN = "<image>"
"""Placeholder in the token sequence; ``tokens_per_image`` of them represent an image."""


class OpenClipVisionConfig(PretrainedConfig):
    """Configuration of a complete open_clip tower: ``vision_cfg`` and values derived from it.

    ``num_prefix_tokens`` counts class and register tokens.
    """

    model_type = "coat_open_clip_vision"
    base_config_key = "vision_config"

    vision_cfg: dict[str, Any] | None = None
    quick_gelu: bool = False
    hidden_size: int = 768
    image_size: int = 224
    patch_size: int = 16
    num_hidden_layers: int = 12
    num_prefix_tokens: int = 1
    image_mean: list[float] | None = None
    image_std: list[float] | None = None


class CoatVlmConfig(PretrainedConfig):
    """Configuration of :class:`coat_vlm.model.vlm.CoatVlm`; wrong values raise ValueError.

    ``vision_config`` is the complete tower's; None, together with ``projector_type`` and
    ``image_token_id``, for a language model without vision. ``select_feature`` ``patch`` drops
    class and register tokens, ``cls_patch`` keeps them. ``s2_scales`` are the sides of an image's
    scales in pixels, starting with the tower's input size; None for one scale.
    """

    model_type = "coat_vlm"
    # transformers declares it as a property of the class and reads it as a dict.
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012 # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __init__(
        self,
        vision_config: PretrainedConfig | dict[str, Any] | None = None,
        text_config: PretrainedConfig | dict[str, Any] | None = None,
        projector_type: str | None = "mlp_downsample",
        select_layer: int = -2,
        select_feature: str = "patch",
        image_token_id: int | None = 0,
        s2_scales: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        # The base class would overwrite the setting of the parts' configurations with None.
        attention = kwargs.pop("attn_implementation", None)
        super().__init__(**kwargs)
        self.vision_config: Any = None
        if vision_config is not None or projector_type is not None:
            # transformers creates a configuration without arguments to find the defaults.
            self.vision_config = _sub_config(vision_config or SiglipVisionConfig())
        self.text_config = _sub_config(text_config or Qwen2Config())
        self.projector_type = projector_type
        self.select_layer = select_layer
        self.select_feature = select_feature
        self.image_token_id = image_token_id
        self.s2_scales = None if s2_scales is None else list(s2_scales)
        if attention is not None:
            self._attn_implementation = attention  # also sets it in the parts' configurations
        self._check()

    @property
    def has_vision(self) -> bool:
        """Whether the model has tower and projector."""
        return self.vision_config is not None

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens before the patches in the complete tower."""
        vision = self.vision_config
        if vision.model_type == "siglip_vision_model":
            return 0
        return getattr(vision, "num_prefix_tokens", 1 + getattr(vision, "num_register_tokens", 0))

    @property
    def feature_size(self) -> int:
        """Width of the projector's input: the tower's features of all scales."""
        return self.vision_config.hidden_size * len(self.s2_scales or (0,))

    @property
    def tokens_per_image(self) -> int:
        """Number of placeholders and projected features per image tile; 0 without a tower."""
        if self.projector_type is None:
            return 0
        grid = self.vision_config.image_size // self.vision_config.patch_size
        tokens = count_projected_tokens(self.projector_type, grid)
        return tokens + (self.num_prefix_tokens if self.select_feature == "cls_patch" else 0)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json of a composed checkpoint."""
        name = os.fspath(pretrained_model_name_or_path)
        try:
            config, rest = super().get_config_dict(name, **kwargs)
        except OSError as error:
            raise ValueError(
                f"no config.json of a coat_vlm checkpoint at {name!r}; give the folder that "
                f"training wrote (RUN/<stage>/model): {error}"
            ) from error
        if config.get("model_type") != cls.model_type:
            raise ValueError(
                f"{name!r} is not a coat_vlm checkpoint: its model_type is "
                f"{config.get('model_type')!r}, required: {cls.model_type!r}; to start from a "
                "vision tower or a language model, name it in the recipe "
                "(model.vision.name_or_path, model.language.name_or_path)"
            )
        return config, rest

    def _check(self) -> None:
        if self.projector_type is None or self.image_token_id is None:
            return
        block = block_size(self.projector_type)
        count_needed_layers(self.vision_config.num_hidden_layers, self.select_layer)
        if block > 1 and self.select_feature == "cls_patch" and self.num_prefix_tokens:
            raise ValueError(
                f"projector {self.projector_type} needs a square grid of patches, without the "
                f"{self.num_prefix_tokens} class token(s) of select_feature=cls_patch; use "
                "select_feature=patch, or projector linear or mlp2x_gelu"
            )
        if self.s2_scales is not None:
            self._check_scales(self.s2_scales)
        if not 0 <= self.image_token_id < self.text_config.vocab_size:
            raise ValueError(
                f"image_token_id {self.image_token_id} is outside the language model's vocabulary "
                f"of {self.text_config.vocab_size}; resize its embeddings to the tokenizer"
            )

    def _check_scales(self, scales: list[int]) -> None:
        size = self.vision_config.image_size
        ascending = scales == sorted(set(scales)) and all(scale % size == 0 for scale in scales)
        if len(scales) < 2 or scales[0] != size or not ascending:
            raise ValueError(
                f"s2_scales={scales} do not fit a tower of {size} pixels; give two or more "
                f"ascending multiples of {size} that start with {size}, e.g. [{size}, {2 * size}, "
                f"{3 * size}]"
            )
        if self.select_feature == "cls_patch" and self.num_prefix_tokens:
            raise ValueError(
                "images of several scales need a square grid of patches, and select_feature="
                f"cls_patch keeps {self.num_prefix_tokens} class token(s); use select_feature=patch"
            )


def count_needed_layers(num_layers: int, select_layer: int) -> int:
    """Count the blocks that hidden state ``select_layer`` needs, by transformers' indices.

    Index i is the output of block i, counted from 1; negative ones count from the end.
    """
    index = select_layer if select_layer >= 0 else num_layers + 1 + select_layer
    if not 1 <= index <= num_layers:
        raise ValueError(
            f"select_layer={select_layer} is not an output of the tower's {num_layers} blocks; "
            f"allowed: 1 to {num_layers}, or -1 (the last) to -{num_layers}"
        )
    return index


def count_layers(config: Any) -> tuple[int, int]:
    """Count the blocks of a tower whose outputs are used, by attention to all patches and windows.

    ``config`` is the configuration of a composed or published model.
    """
    vision = config.vision_config
    number = getattr(vision, "depth", None) or vision.num_hidden_layers
    selected = getattr(config, "select_layer", getattr(config, "vision_feature_layer", None))
    chosen = selected if isinstance(selected, list) else [-1 if selected is None else selected]
    used = max(count_needed_layers(number, layer) for layer in chosen)
    whole = getattr(vision, "fullatt_block_indexes", range(used))  # others attend to windows
    full = sum(layer < used for layer in whole)
    return full, used - full


def _sub_config(config: PretrainedConfig | dict[str, Any]) -> PretrainedConfig:
    if isinstance(config, PretrainedConfig):
        return config
    values = dict(config)
    return CONFIG_MAPPING[values.pop("model_type")](**values)
