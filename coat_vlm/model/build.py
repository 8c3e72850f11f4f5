"""Builds the composed model of a recipe, from scratch or from pretrained parts."""

import copy
import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.model.configuration import IMAGE_TOKEN, CoatVlmConfig
from coat_vlm.model.pretrained import load_weights, read_config
from coat_vlm.model.projector import build_projector
from coat_vlm.model.vision import (
    CONTRASTIVE,
    VISION_MODELS,
    VisionTower,
    build_open_clip,
    load_open_clip,
    resize_positions,
    use_processor_size,
)
from coat_vlm.model.vlm import CoatVlm

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Old names of RoPE settings that transformers' configurations still accept.
_LEGACY_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def build_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> CoatVlm:
    """Build the model of a recipe, each part from its checkpoint or with random weights.

    Random weights are drawn in the order tower, language model, projector. Embeddings smaller than
    the tokenizer (which contains ``<image>`` if there is a tower) are extended as in transformers.
    ``dtype`` of all weights is FP32 by default. Raises ValueError if a checkpoint or configuration
    is unsupported, incomplete or contradictory.
    """
    dtype = dtype or torch.float32
    vision_config = backbone = tower = projector = image_token_id = None
    if model.vision is not None:
        image_token_id = tokenizer.get_vocab().get(IMAGE_TOKEN)
        if image_token_id is None:
            raise ValueError(
                f"the tokenizer has no {IMAGE_TOKEN} token; add it with "
                "coat_vlm.model.processor.prepare_tokenizer before building the model"
            )
        vision_config, backbone = _load_vision(model.vision, dtype, model.attn_implementation)
        vision_config.dtype = dtype
    language = _load_language(model.language, tokenizer, dtype, model.attn_implementation)
    extend_context(language, model)
    text = language.config
    config = _composed_config(
        model, vision_config, text, image_token_id=image_token_id, dtype=dtype
    )
    if backbone is not None:
        tower = VisionTower(config, backbone).to(dtype)
        kind = model.projector.type
        projector = build_projector(kind, config.feature_size, text.hidden_size).to(dtype)
    # On meta: no memory and no random numbers. The real parts replace its modules.
    with torch.device("meta"):
        composed = CoatVlm(config)
    composed.vision_tower = tower
    composed.projector = projector
    composed.language_model = language
    composed.config.text_config = text
    suppressed = composed.generation_config.suppress_tokens
    generation = copy.deepcopy(language.generation_config)
    assert generation is not None
    generation.suppress_tokens = suppressed
    for name in _SPECIAL_IDS:
        # Keep a published model's own setting: it may have several stop tokens.
        if getattr(generation, name) is None:
            setattr(generation, name, getattr(tokenizer, name))
    composed.generation_config = generation
    return composed


def _composed_config(
    model: ModelConfig, vision: PretrainedConfig | None, text: PretrainedConfig, **kwargs: Any
) -> CoatVlmConfig:
    if model.vision is None or vision is None:
        kwargs |= {"projector_type": None, "image_token_id": None}
    else:
        if model.image.mode == "dynamic_s2":  # VILA's scales: 1, 2 and 3 times the tower's input
            size = vision.image_size
            kwargs["s2_scales"] = list(model.image.s2_scales or (size, 2 * size, 3 * size))
        kwargs |= {
            "vision_config": vision,
            "projector_type": model.projector.type,
            "select_layer": model.vision.select_layer,
            "select_feature": model.vision.select_feature,
        }
    return CoatVlmConfig(text_config=text, attn_implementation=model.attn_implementation, **kwargs)


def _load_vision(
    vision: VisionConfig, dtype: torch.dtype, attention: str
) -> tuple[PretrainedConfig, nn.Module]:
    if vision.library == "open_clip":
        if vision.name_or_path is not None:
            return load_open_clip(vision.name_or_path)
        return build_open_clip(vision.config or {})
    config = _vision_config(vision)
    kind = VISION_MODELS[config.model_type]
    if vision.name_or_path is None:
        return config, kind._from_config(config, dtype=dtype, attn_implementation=attention)
    where, path = "model.vision.name_or_path", vision.name_or_path
    options = {"attn_implementation": attention}
    # Classifiers have no pooling head, which is not used.
    options |= {"add_pooling_layer": False} if config.model_type == "vit" else {}
    tower: PreTrainedModel = load_weights(kind, where, path, dtype=dtype, **options)
    resize_positions(tower, config.image_size)
    return tower.config, tower


def _load_language(
    language: LanguageConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, attention: str
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


def extend_context(language: PreTrainedModel, model: ModelConfig) -> None:
    """Set the base of the rotary embedding of a recipe (``rope_theta``), and the longest context.

    A larger base keeps longer distances inside the angles of training (Xiong et al. 2023,
    arXiv:2309.16039, section 4.1). Raises ValueError without a rotary embedding that has one base.
    """
    theta = model.language.rope_theta
    if theta is None:
        return
    config: Any = language.config
    rotary = getattr(language.base_model, "rotary_emb", None)
    if rotary is None or "rope_theta" not in (getattr(config, "rope_parameters", None) or {}):
        raise ValueError(
            f"model.language.rope_theta={theta:g}: {type(language).__name__} has no rotary "
            "embedding with one base; remove the key"
        )
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    config.max_position_embeddings = max(config.max_position_embeddings, model.max_length)
    device = rotary.inv_freq.device
    setattr(language.base_model, "rotary_emb", type(rotary)(config).to(device))  # noqa: B010


def check_causal(where: str, path: str, config: PretrainedConfig) -> None:
    """Raise ValueError unless the configuration describes a causal language model."""
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


def create_config(
    where: str, values: Mapping[str, Any], allowed: tuple[str, ...]
) -> PretrainedConfig:
    """Create a transformers configuration from a recipe's keys; ValueError if one is wrong."""
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


def build_meta_model(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> CoatVlm:
    """Build the model of :func:`build_model` on ``meta``, reading only configurations.

    ``vocab_size`` includes ``<image>`` if the model has a tower.
    """
    where, path = "model.language.name_or_path", model.language.name_or_path
    with torch.device("meta"):
        tower = None if model.vision is None else _vision_config(model.vision)
        if path is None:
            text = _new_text_config(model.language, vocab_size, {})
        else:
            text = copy.deepcopy(read_config(where, path))
            check_causal(where, path, text)
            text.vocab_size = max(text.vocab_size, vocab_size)
        config = _composed_config(model, tower, text)
    return create_meta_model(config, dtype)


def create_meta_model(config: CoatVlmConfig, dtype: torch.dtype) -> CoatVlm:
    """Create a composed model on ``meta``, with tied embeddings if configured."""
    with torch.device("meta"):
        meta_model = CoatVlm(config)
    meta_model.to(dtype)  # pyright: ignore[reportArgumentType] - transformers declares its own
    meta_model.language_model.tie_weights()
    return meta_model


def _vision_config(vision: VisionConfig) -> PretrainedConfig:
    path = vision.name_or_path
    if vision.library == "open_clip":
        if path is not None:
            # Only loading an open_clip checkpoint gives its configuration.
            with torch.device("cpu"):
                return load_open_clip(path)[0]
        return build_open_clip(vision.config or {})[0]
    if path is None:
        return create_config("model.vision.config", vision.config or {}, tuple(VISION_MODELS))
    where = "model.vision.name_or_path"
    found = read_config(where, path).model_type
    # ``siglip`` and ``clip`` checkpoints contain a tower.
    wanted = {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}.get(found, found)
    if wanted not in VISION_MODELS:
        raise ValueError(
            f"{where}={path!r} is a checkpoint of model_type {found!r}; allowed: siglip, clip, "
            f"{', '.join(VISION_MODELS)}; for an open_clip folder set "
            "model.vision.library=open_clip"
        )
    config = VISION_MODELS[wanted].config_class.from_pretrained(path)
    if wanted not in CONTRASTIVE:
        use_processor_size(config, path)
    return config


def _new_text_config(
    language: LanguageConfig, vocab_size: int, defaults: Mapping[str, Any]
) -> PretrainedConfig:
    values: dict[str, Any] = {**defaults, **(language.config or {})}
    values["vocab_size"] = max(values.get("vocab_size", 0), vocab_size)
    allowed = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return create_config("model.language.config", values, allowed)
