"""The model of a recipe on torch's ``meta`` device: shapes and names without memory or weights."""

import copy
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.model.build import VISION_MODELS, check_causal, config_from, tower_type
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.open_clip_tower import build_open_clip, load_open_clip
from coat_vlm.model.pretrained import read_config
from coat_vlm.model.vlm import CoatVlm


def model_frame(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> CoatVlm:
    """What :func:`coat_vlm.model.build_model` builds, on ``meta``: only configurations are read.

    Args:
        model: the recipe's model section.
        vocab_size: tokens of the tokenizer, ``<image>`` included where there is a tower.
        dtype: dtype of all weights.

    Raises:
        ValueError: as ``build_model``, for what configurations can tell.
    """
    vision = model.vision
    with torch.device("meta"):
        language = _text_config(model.language, vocab_size)
        if vision is None:
            config = CoatVlmConfig(
                text_config=language,
                projector_type=None,
                image_token_id=None,
                attn_implementation=model.attention,
            )
        else:
            config = CoatVlmConfig(
                vision_config=_vision_config(vision),
                text_config=language,
                projector_type=model.projector.type,
                select_layer=vision.select_layer,
                select_feature=vision.select_feature,
                attn_implementation=model.attention,
            )
    return frame_of(config, dtype)


def saved_frame(path: str, attention: str, dtype: torch.dtype) -> CoatVlm:
    """The model of a composed checkpoint, on ``meta``.

    Args:
        path: the checkpoint's folder.
        attention: attention implementation.
        dtype: dtype of all weights.

    Raises:
        ValueError: there is no configuration of a composed model.
    """
    config = CoatVlmConfig.from_pretrained(path)
    config._attn_implementation = attention
    return frame_of(config, dtype)


def frame_of(config: CoatVlmConfig, dtype: torch.dtype) -> CoatVlm:
    """A composed model on ``meta``, its embeddings tied where the configuration says so."""
    with torch.device("meta"):
        frame = CoatVlm(config)
    frame.to(dtype)  # pyright: ignore[reportArgumentType] - transformers declares its own
    frame.language_model.tie_weights()
    return frame


def _vision_config(vision: VisionConfig) -> PretrainedConfig:
    path = vision.name_or_path
    if vision.library == "open_clip":
        if path is not None:
            # open_clip describes a checkpoint by loading it.
            with torch.device("cpu"):
                return load_open_clip(path)[0]
        return build_open_clip(vision.config or {})[0]
    if path is not None:
        return VISION_MODELS[tower_type(path)].config_class.from_pretrained(path)
    return config_from("model.vision.config", vision.config or {}, tuple(VISION_MODELS))


def _text_config(language: LanguageConfig, vocab_size: int) -> PretrainedConfig:
    path = language.name_or_path
    if path is None:
        values: dict[str, Any] = dict(language.config or {})
        values["vocab_size"] = max(values.get("vocab_size", 0), vocab_size)
        allowed = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        return config_from("model.language.config", values, allowed)
    where = "model.language.name_or_path"
    config = copy.deepcopy(read_config(where, path))
    check_causal(where, path, config)
    config.vocab_size = max(config.vocab_size, vocab_size)
    return config
