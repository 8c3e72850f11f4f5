"""Builds the composed model of a recipe, from scratch or from pretrained parts.

:func:`build_model` has its weights; :func:`model_frame` is the same model on torch's ``meta``
device: shapes and names without memory or weights.
"""

import copy
import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    CLIPVisionModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SiglipVisionModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.model.configuration import IMAGE_TOKEN, CoatVlmConfig
from coat_vlm.model.pretrained import load_weights, read_config
from coat_vlm.model.projector import Projector, build_projector
from coat_vlm.model.vision import VisionTower, build_open_clip, load_open_clip
from coat_vlm.model.vlm import CoatVlm

VISION_MODELS = {"siglip_vision_model": SiglipVisionModel, "clip_vision_model": CLIPVisionModel}
"""Towers of transformers by model type; ``siglip`` and ``clip`` checkpoints contain one."""

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Older names of RoPE settings, which transformers' configurations still take.
_LEGACY_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def build_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> CoatVlm:
    """The model of a recipe: each part from its checkpoint or, by its config, from random weights.

    Random weights come from torch's global generator, in the order tower, language model,
    projector: the same seed gives the same model. The embeddings grow to the tokenizer's size where
    they are smaller (new rows drawn around the old ones' mean, as transformers does) and are never
    cut: the padded vocabularies of published models stay.

    Args:
        model: the recipe's model section.
        tokenizer: the tokenizer, with ``<image>`` among its tokens.
        dtype: dtype of all weights; FP32 when absent, whatever the checkpoints hold.

    With ``vision: null`` in the recipe there is a language model alone.

    Raises:
        ValueError: a checkpoint or configuration is of another kind, incomplete or contradictory.
    """
    dtype = dtype or torch.float32
    vision_config = backbone = tower = projector = image_token_id = scales = None
    if model.vision is not None:
        image_token_id = tokenizer.get_vocab().get(IMAGE_TOKEN)
        if image_token_id is None:
            raise ValueError(
                f"the tokenizer has no {IMAGE_TOKEN} token; add it with "
                "coat_vlm.model.processor.prepare_tokenizer before building the model"
            )
        vision_config, backbone = _vision(model.vision, dtype, model.attention)
        vision_config.dtype = dtype
        if model.image.mode == "dynamic_s2":  # VILA's are one, two and three times the tower's
            size = vision_config.image_size
            scales = list(model.image.s2_scales or (size, 2 * size, 3 * size))
    language = _language(model.language, tokenizer, dtype, model.attention)
    text = language.config
    config = _composed_config(
        model, vision_config, text, image_token_id=image_token_id, s2_scales=scales, dtype=dtype
    )
    if backbone is not None:
        tower = VisionTower(config, backbone).to(dtype)
        kind = model.projector.type
        projector = build_projector(kind, config.feature_size, text.hidden_size).to(dtype)
    return _compose(config, tower, projector, language, tokenizer)


def _composed_config(
    model: ModelConfig, vision: PretrainedConfig | None, text: PretrainedConfig, **kwargs: Any
) -> CoatVlmConfig:
    """The configuration of a recipe's model; without a tower it is a language model alone."""
    if model.vision is None:
        kwargs |= {"projector_type": None, "image_token_id": None}
    else:
        kwargs |= {
            "vision_config": vision,
            "projector_type": model.projector.type,
            "select_layer": model.vision.select_layer,
            "select_feature": model.vision.select_feature,
        }
    return CoatVlmConfig(text_config=text, attn_implementation=model.attention, **kwargs)


def _compose(
    config: CoatVlmConfig,
    tower: VisionTower | None,
    projector: Projector | None,
    language: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> CoatVlm:
    # A frame without memory or random numbers, into which the real parts go.
    with torch.device("meta"):
        composed = CoatVlm(config)
    composed.vision_tower = tower
    composed.projector = projector
    composed.language_model = language
    composed.config.text_config = language.config
    suppressed = composed.generation_config.suppress_tokens
    generation = copy.deepcopy(language.generation_config)
    assert generation is not None
    generation.suppress_tokens = suppressed
    for name in _SPECIAL_IDS:
        # A published model's own choice stays: it may stop at several tokens.
        if getattr(generation, name) is None:
            setattr(generation, name, getattr(tokenizer, name))
    composed.generation_config = generation
    return composed


def _vision(
    vision: VisionConfig, dtype: torch.dtype, attention: str
) -> tuple[PretrainedConfig, nn.Module]:
    """Configuration and complete tower."""
    if vision.library == "open_clip":
        if vision.name_or_path is not None:
            return load_open_clip(vision.name_or_path)
        return build_open_clip(vision.config or {})
    if vision.name_or_path is not None:
        kind, where = VISION_MODELS[tower_type(vision.name_or_path)], "model.vision.name_or_path"
        tower: PreTrainedModel = load_weights(
            kind, where, vision.name_or_path, dtype=dtype, attn_implementation=attention
        )
        return tower.config, tower
    config = _vision_config(vision)
    model_class = VISION_MODELS[config.model_type]
    tower = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    return config, tower


def tower_type(path: str) -> str:
    """The model type of the tower in a checkpoint of transformers, a key of VISION_MODELS.

    Raises:
        ValueError: there is none.
    """
    where = "model.vision.name_or_path"
    found = read_config(where, path).model_type
    wanted = {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}.get(found, found)
    if wanted not in VISION_MODELS:
        raise ValueError(
            f"{where}={path!r} is a checkpoint of model_type {found!r}; allowed: siglip, clip, "
            f"{', '.join(VISION_MODELS)}; for an open_clip folder set "
            "model.vision.library=open_clip"
        )
    return wanted


def _language(
    language: LanguageConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    if language.name_or_path is None:
        ids = {name: getattr(tokenizer, name) for name in _SPECIAL_IDS}
        config = _new_text_config(language, len(tokenizer), ids)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    where = "model.language.name_or_path"
    check_causal(where, language.name_or_path, read_config(where, language.name_or_path))
    model = load_weights(
        AutoModelForCausalLM,
        where,
        language.name_or_path,
        dtype=dtype,
        attn_implementation=attention,
    )
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # pyright: ignore[reportIndexIssue]
        model.resize_token_embeddings(len(tokenizer))
    return model


def check_causal(where: str, path: str, config: PretrainedConfig) -> None:
    """Refuse the configuration of what is not a causal language model, with ValueError."""
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    architectures = config.architectures or [expected]
    if expected not in architectures or getattr(config, "vision_config", None) is not None:
        hint = "; to continue from a composed checkpoint set init_from"
        raise ValueError(
            f"{where}={path!r} is a checkpoint of model_type {config.model_type!r} "
            f"({', '.join(map(str, architectures))}), not a causal language model; allowed: models "
            "of AutoModelForCausalLM such as llama, mistral, qwen2, qwen3 (class ...ForCausalLM)"
            f"{hint if config.model_type == CoatVlmConfig.model_type else ''}"
        )


def config_from(
    where: str, values: Mapping[str, Any], allowed: tuple[str, ...]
) -> PretrainedConfig:
    """A transformers configuration from a recipe's keys, all of which must be known to it.

    Args:
        where: the recipe key, for the error.
        values: ``model_type`` and settings.
        allowed: model types.

    Raises:
        ValueError: the type is not allowed or a setting unknown.
    """
    values = dict(values)
    model_type = values.pop("model_type", None)
    if model_type not in allowed:
        close = difflib.get_close_matches(str(model_type), allowed, n=1)
        examples = ", ".join(close or (allowed if len(allowed) < 5 else ("llama", "qwen2", "...")))
        raise ValueError(f"{where}: model_type is {model_type!r}; allowed: {examples}")
    config_class = CONFIG_MAPPING[model_type]
    known = {*dir(config_class()), *_LEGACY_KEYS}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{where}: {model_type} has no setting {key!r}{hint}")
    return config_class(**values)


def model_frame(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> CoatVlm:
    """What :func:`coat_vlm.model.build_model` builds, on ``meta``: only configurations are read.

    Args:
        model: the recipe's model section.
        vocab_size: tokens of the tokenizer, ``<image>`` included where there is a tower.
        dtype: dtype of all weights.

    Raises:
        ValueError: as ``build_model``, for what configurations can tell.
    """
    with torch.device("meta"):
        tower = None if model.vision is None else _vision_config(model.vision)
        config = _composed_config(model, tower, _text_config(model.language, vocab_size))
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
        return _new_text_config(language, vocab_size, {})
    where = "model.language.name_or_path"
    config = copy.deepcopy(read_config(where, path))
    check_causal(where, path, config)
    config.vocab_size = max(config.vocab_size, vocab_size)
    return config


def _new_text_config(
    language: LanguageConfig, vocab_size: int, defaults: Mapping[str, Any]
) -> PretrainedConfig:
    """The configuration of a language model from scratch, with at least ``vocab_size`` tokens."""
    values: dict[str, Any] = {**defaults, **(language.config or {})}
    values["vocab_size"] = max(values.get("vocab_size", 0), vocab_size)
    allowed = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return config_from("model.language.config", values, allowed)
