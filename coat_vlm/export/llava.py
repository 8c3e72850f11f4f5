"""Writes the layout ``llava`` of transformers' ``LlavaForConditionalGeneration``.

    vision_tower.vision_model.*           the tower, up to the selected hidden state
    multi_modal_projector.linear_1, _2    Linear(C, H), GELU, Linear(H, H)
    language_model.model.*, .lm_head      the language model; no lm_head with tied embeddings

``vision_feature_layer`` is therefore -1. ``vision_feature_select_strategy`` ``default`` drops the
first token; SigLIP has no class token, so its value is always ``full``.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.export.folder import write_config
from coat_vlm.export.transformers_parts import (
    LANGUAGE,
    PROJECTOR,
    add_legacy_names,
    build_image_processor,
    build_plain_tower,
    check_frames,
    make_tokenizer,
    rename_tower_weights,
    save_stock,
    select_weights,
)
from coat_vlm.model import CoatVlm
from coat_vlm.model.configuration import IMAGE_TOKEN
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.processor import CoatVlmProcessor

_LAYERS = {"0.": "linear_1.", "2.": "linear_2."}  # the projector's layers; layer 1 is GELU
_LAYOUT = "LlavaForConditionalGeneration"


def save_llava(
    folder: Path, model: CoatVlm, processor: CoatVlmProcessor, state: dict[str, Tensor]
) -> None:
    """Write the folder; ValueError if the layout cannot represent the model."""
    check_llava(model, processor)
    tower = build_plain_tower(model, "llava")
    config: Any = model.config
    vision, language = tower.config, copy.deepcopy(config.text_config)
    drops_class_token = config.select_feature == "patch" and config.num_prefix_tokens > 0
    strategy = "default" if drops_class_token else "full"
    llava = LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=config.image_token_id,
        image_seq_length=config.tokens_per_image,
        projector_hidden_act="gelu",
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
        tie_word_embeddings=bool(language.tie_word_embeddings),
    )
    with torch.device("meta"):
        stock: Any = LlavaForConditionalGeneration(llava)
    stock.to(model.dtype)
    weights = rename_tower_weights(tower, state, "vision_tower.")
    for old, new in _LAYERS.items():
        weights |= select_weights(state, PROJECTOR + old, f"multi_modal_projector.{new}")
    weights |= select_weights(state, LANGUAGE, LANGUAGE)
    tokenizer = make_tokenizer(processor)
    tokenizer.padding_side = "left"  # for generation
    files = LlavaProcessor(
        image_processor=build_image_processor(processor, model, pad=processor.image_mode == "pad"),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=strategy,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=config.num_prefix_tokens,
    )
    save_stock(folder, model, stock, files, weights, processor)
    saved = read_json(folder / "config.json")
    saved["text_config"] = add_legacy_names(saved["text_config"])
    saved["torch_dtype"] = saved["dtype"]
    write_config(folder / "config.json", saved)


def check_llava(model: CoatVlm, processor: CoatVlmProcessor) -> None:
    """Raise ValueError if the layout cannot represent the model, before anything is written."""
    config = model.config
    if config.projector_type != "mlp2x_gelu":
        raise ValueError(
            f"--format llava: the model's projector is {config.projector_type}, and {_LAYOUT} "
            "supports only mlp2x_gelu (Linear, GELU, Linear); allowed: mlp2x_gelu; export with "
            "--format coat or vila"
        )
    if processor.image_mode not in ("resize", "pad"):
        raise ValueError(
            f"--format llava: the image mode is {processor.image_mode} with several tiles per "
            f"image, and {_LAYOUT} supports one square; allowed: resize, pad; export with --format "
            "coat or vila"
        )
    check_frames(processor, "llava")
    why = why_logits_are_needed(model.language_model)
    if why is not None or model.language_model.base_model_prefix != "model":
        name = type(model.language_model).__name__
        raise ValueError(
            f"--format llava: {_LAYOUT} applies a plain output layer to the decoder's output, and "
            f"{name} does not: {why or 'its decoder has another name'}; allowed: models such as "
            "llama, mistral, qwen2, qwen3; export with --format coat"
        )
