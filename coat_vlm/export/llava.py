"""Writes and reads the layout ``llava`` of transformers' ``LlavaForConditionalGeneration``.

    vision_tower.vision_model.*           the tower, up to the selected hidden state
    multi_modal_projector.linear_1, _2    Linear(C, H), GELU, Linear(H, H)
    language_model.model.*, .lm_head      the language model; no lm_head with tied embeddings

``vision_feature_layer`` is therefore -1. ``vision_feature_select_strategy`` ``default`` drops the
first token; SigLIP has no class token, so its value is always ``full``.
"""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.export.folder import write_config
from coat_vlm.export.transformers_parts import (
    LANGUAGE,
    PROJECTOR,
    TOWER,
    add_legacy_names,
    build_image_processor,
    build_plain_tower,
    check_frames,
    make_tokenizer,
    rename_tower_weights,
    save_stock,
    select_weights,
)
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.build import create_meta_model
from coat_vlm.model.configuration import IMAGE_TOKEN
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.pretrained import load_auto, load_weights
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vision import CONTRASTIVE

logger = logging.getLogger(__name__)

_LAYERS = {"0.": "linear_1.", "2.": "linear_2."}  # the projector's layers; layer 1 is GELU
_LAYOUT = "LlavaForConditionalGeneration"
_TEMPLATES = {"<|im_start|>user": "chatml", "USER:": "vicuna_v1"}  # by a user's turn


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


def is_llava(folder: Path) -> bool:
    """Return whether a folder has the layout ``llava``."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == LlavaConfig.model_type


def load_llava(folder: Path, dtype: torch.dtype | None = None) -> tuple[CoatVlm, CoatVlmProcessor]:
    """Load the composed model and its processor from a checkpoint like llava-hf's, on the CPU.

    Raises ValueError if files are damaged or missing, or the checkpoint is not supported.
    """
    config = LlavaConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder} has compressed weights, which are read only in the layout coat; export the "
            "checkpoint that it was made from"
        )
    composed = _compose_config(folder, config)
    try:
        found = load_auto(AutoProcessor, folder, backend="pil")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: the processor cannot be loaded: {error}; required: the tokenizer and "
            "preprocessor_config.json or processor_config.json of the checkpoint"
        ) from error
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    stock: Any = load_weights(
        LlavaForConditionalGeneration, "CKPT", str(folder), dtype=dtype or stored
    )
    composed.dtype = stock.dtype
    composed.text_config = stock.config.text_config
    composed.tie_word_embeddings = stock.config.tie_word_embeddings
    tower = {
        name.removeprefix("vision_model."): tensor
        for name, tensor in stock.model.vision_tower.state_dict().items()
    }
    projector = stock.model.multi_modal_projector.state_dict()
    state = {
        **{f"{LANGUAGE}model.{n}": t for n, t in stock.model.language_model.state_dict().items()},
        f"{LANGUAGE}lm_head.weight": stock.lm_head.weight,
    }
    for old, new in _LAYERS.items():
        state |= select_weights(projector, new, PROJECTOR + old)
    model = create_meta_model(composed, stock.dtype)
    for name in model.state_dict():
        if name.startswith(TOWER):  # the tower's blocks after the selected layer are not needed
            state[name] = tower[name.removeprefix(TOWER).removeprefix("vision_model.")]
    model.load_state_dict(state, assign=True)
    model.language_model.tie_weights()
    model.generation_config = copy.deepcopy(stock.generation_config)
    return model.eval(), _compose_processor(folder, found, composed)


def _compose_config(folder: Path, config: Any) -> CoatVlmConfig:
    where = f"{folder}/config.json"
    tower: Any = config.vision_config
    layer = config.vision_feature_layer
    if tower.model_type not in CONTRASTIVE:
        raise ValueError(
            f"{where}: the tower is of model_type {tower.model_type!r}; allowed: "
            f"{', '.join(CONTRASTIVE)}"
        )
    if not isinstance(layer, int) or config.projector_hidden_act != "gelu":
        raise ValueError(
            f"{where}: vision_feature_layer is {layer}, projector_hidden_act is "
            f"{config.projector_hidden_act!r}; allowed: one layer, and gelu"
        )
    has_class_token = tower.model_type == "clip_vision_model"
    drops = config.vision_feature_select_strategy == "default"
    if drops and not has_class_token:
        raise ValueError(
            f"{where}: vision_feature_select_strategy is default, with which the first patch of a "
            f"tower without a class token ({tower.model_type}) is dropped; allowed: full"
        )
    return CoatVlmConfig(
        vision_config=tower,
        text_config=config.text_config,
        projector_type="mlp2x_gelu",
        select_layer=layer,
        select_feature="patch" if drops or not has_class_token else "cls_patch",
        image_token_id=config.image_token_id,
    )


def _compose_processor(folder: Path, found: Any, config: CoatVlmConfig) -> CoatVlmProcessor:
    images, tokenizer = found.image_processor, found.tokenizer
    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != config.image_token_id:
        raise ValueError(
            f"{folder}: image_token_index is {config.image_token_id}, and the tokenizer has "
            f"{tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)} for {IMAGE_TOKEN}; both must agree"
        )
    # LLaVA 1.5 was trained with padded images (haotian-liu/LLaVA, scripts/v1_5/finetune.sh).
    crops = images.size.shortest_edge is not None and bool(images.do_center_crop)
    if crops:
        logger.warning(
            "%s crops images to a square; the imported model pads them instead, as LLaVA 1.5 was "
            "trained, so that no side is lost; model.image.mode of a recipe changes it",
            folder,
        )
    return CoatVlmProcessor(
        tokenizer,
        image_size=config.vision_config.image_size,
        image_mean=images.image_mean,
        image_std=images.image_std,
        image_resample=images.resample,
        image_mode="pad" if crops or getattr(images, "do_pad", False) else "resize",
        tokens_per_image=config.tokens_per_image,
        template=_find_template(folder, found),
    )


def _find_template(folder: Path, processor: Any) -> str:
    """Return the name of the checkpoint's chat template; LLaVA 1.5's, if it has none.

    llava-hf's template leaves out the system prompt that LLaVA 1.5 was trained with.
    """
    if not (processor.chat_template or processor.tokenizer.chat_template):
        return "vicuna_v1"
    turn = {"role": "user", "content": [{"type": "text", "text": "question"}]}
    prompt = processor.apply_chat_template([turn], tokenize=False)
    for mark, name in _TEMPLATES.items():
        if mark in prompt:
            return name
    raise ValueError(
        f"{folder}: the chat template writes a user's turn as {prompt!r}; allowed: templates with "
        f"{' or '.join(map(repr, _TEMPLATES))}"
    )
