"""Writes a composed model as ``LlavaForConditionalGeneration``, which stock transformers loads.

Names of weights are those of the published llava-hf checkpoints, which vLLM and SGLang read:

    vision_tower.vision_model.*           the tower, up to the hidden state that is read
    multi_modal_projector.linear_1, _2    Linear(C, H), GELU, Linear(H, H)
    language_model.model.*, .lm_head      the language model; no lm_head where embeddings are tied

Of the tower only the blocks that were trained are left, so ``vision_feature_layer`` is -1.
``vision_feature_select_strategy`` ``default`` drops the first token, which only a tower with a
class token has: SigLIP's is always ``full``.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.export.transformers_parts import (
    LANGUAGE,
    PROJECTOR,
    part_of,
    plain_tower,
    save_stock,
    tokenizer_with_template,
    tower_weights,
    with_older_names,
    write_config,
)
from coat_vlm.model import IMAGE_TOKEN, CoatVlm
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.processor import CoatVlmProcessor

_LAYERS = {"0.": "linear_1.", "2.": "linear_2."}  # of the projector, whose layer 1 is GELU
_LAYOUT = "LlavaForConditionalGeneration"


def save_llava(
    folder: Path, model: CoatVlm, state: dict[str, Tensor], processor: CoatVlmProcessor
) -> None:
    """Write configuration, weights, tokenizer and processor.

    Args:
        folder: an existing, empty folder.
        model: gives the configuration; its weights may be on ``meta``.
        state: the weights by the composed model's names.
        processor: gives the tokenizer and the image settings.

    Raises:
        ValueError: the layout has no place for the model's projector, tower, language model or
            way of showing images.
    """
    check_llava(model, processor)
    tower = plain_tower(model, "llava")
    config = model.config
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
    weights = tower_weights(model, tower, state, "vision_tower.")
    for old, new in _LAYERS.items():
        weights |= part_of(state, PROJECTOR + old, f"multi_modal_projector.{new}")
    weights |= part_of(state, LANGUAGE, LANGUAGE)
    save_stock(folder, model, stock, weights, processor)
    saved = read_json(folder / "config.json")
    saved["text_config"] = with_older_names(saved["text_config"])
    saved["torch_dtype"] = saved["dtype"]
    write_config(folder / "config.json", saved)
    _processor(processor, model, strategy).save_pretrained(folder)


def check_llava(model: CoatVlm, processor: CoatVlmProcessor) -> None:
    """Refuse what the layout cannot hold, before anything is written.

    Raises:
        ValueError: names what does not fit, and what would.
    """
    config = model.config
    if config.projector_type != "mlp2x_gelu":
        raise ValueError(
            f"--format llava: the model's projector is {config.projector_type}, and {_LAYOUT} has "
            "only mlp2x_gelu (Linear, GELU, Linear); allowed: mlp2x_gelu; export with --format "
            "coat or vila"
        )
    if processor.image_mode not in ("resize", "pad"):
        raise ValueError(
            f"--format llava: the model sees images in mode {processor.image_mode}, as several "
            f"tiles, and {_LAYOUT} shows one square; allowed: resize, pad; export with --format "
            "coat or vila"
        )
    if "pool_frames" in processor.video:
        raise ValueError(
            "--format llava: the model was trained with model.video.pool_frames="
            f"{processor.video['pool_frames']}, and {_LAYOUT} shows each frame of a video by its "
            "own tokens; allowed: --format coat"
        )
    why = why_logits_are_needed(model.language_model)
    if why is not None or model.language_model.base_model_prefix != "model":
        name = type(model.language_model).__name__
        raise ValueError(
            f"--format llava: {_LAYOUT} puts a plain output layer behind the decoder, and that is "
            f"not what {name} does: {why or 'its decoder has another name'}; allowed: models such "
            "as llama, mistral, qwen2, qwen3; export with --format coat"
        )


def image_processor(processor: CoatVlmProcessor, model: CoatVlm, *, pad: bool) -> Any:
    """The image processor of transformers with the same settings, its Pillow backend.

    Loaded without ``backend="pil"``, the folder gives torchvision's, whose resizing differs by a
    step of 1/255 in some pixels.

    Args:
        processor: gives the settings; of one square.
        model: gives the kind of tower.
        pad: whether it pads an image to a square first, as LLaVA's does.
    """
    size = {"height": processor.image_size, "width": processor.image_size}
    settings: dict[str, Any] = {
        "size": size,
        "image_mean": processor.image_mean,
        "image_std": processor.image_std,
        "resample": processor.image_resample,
        "do_convert_rgb": True,
    }
    if pad:
        return LlavaImageProcessorPil(**settings, do_pad=True, do_center_crop=False, crop_size=size)
    if model.config.vision_config.model_type == "siglip_vision_model":
        return SiglipImageProcessorPil(**settings)
    return CLIPImageProcessorPil(**settings, do_center_crop=False, crop_size=size)


def _processor(processor: CoatVlmProcessor, model: CoatVlm, strategy: str) -> LlavaProcessor:
    tokenizer = tokenizer_with_template(processor)
    tokenizer.padding_side = "left"  # of prompts, for generation
    return LlavaProcessor(
        image_processor=image_processor(processor, model, pad=processor.image_mode == "pad"),
        tokenizer=tokenizer,
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy=strategy,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=model.config.num_prefix_tokens,
    )
