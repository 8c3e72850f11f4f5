"""Shared by all layouts for other programs; and ``language``, for ``AutoModelForCausalLM``."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.export.folder import write_config, write_model
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model import CoatVlm
from coat_vlm.model.chat_templates import JINJA_TEMPLATES
from coat_vlm.model.configuration import count_needed_layers
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vision import CONTRASTIVE, VISION_MODELS

TOWER, PROJECTOR, LANGUAGE = "vision_tower.model.", "projector.layers.", "language_model."
"""Prefixes of the weights in a composed model."""


def select_weights(state: dict[str, Tensor], prefix: str, new: str = "") -> dict[str, Tensor]:
    """Select the tensors whose names start with ``prefix``, and replace the prefix by ``new``."""
    return {
        new + name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def add_legacy_names(config: dict[str, Any]) -> dict[str, Any]:
    """Add transformers 4's names of RoPE settings to a language model's configuration.

    Version 4 ignores ``rope_parameters`` and silently uses a RoPE base of 10,000.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scales = scaling.get("rope_type", "default") != "default"
    return config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scales else None}


def save_language(
    folder: Path, model: CoatVlm, processor: CoatVlmProcessor, weights: dict[str, Tensor]
) -> None:
    """Write configuration, weights and tokenizer."""
    stock, weights = model.language_model, select_weights(weights, LANGUAGE)
    save_stock(folder, model, stock, make_tokenizer(processor), weights, processor)
    write_config(folder / "config.json", add_legacy_names(read_json(folder / "config.json")))


def save_stock(
    folder: Path,
    model: CoatVlm,
    stock: Any,
    files: Any,
    weights: dict[str, Tensor],
    processor: CoatVlmProcessor | None = None,
) -> None:
    """Write a stock model with a composed model's generation settings and stop tokens.

    ``files`` is the tokenizer or processor of the stock model.
    """
    stock.generation_config = copy.deepcopy(model.generation_config)
    if processor is not None:
        set_stop_tokens(stock, processor)
    write_model(folder, stock, files, weights, rename=False)


def make_tokenizer(processor: CoatVlmProcessor) -> Any:
    """Copy the tokenizer, and set the model's chat template in Jinja; none for ``plain``.

    It contains no begin-of-text token, because the tokenizer adds it to every text.
    """
    tokenizer: Any = copy.deepcopy(processor.tokenizer)
    if processor.template != "tokenizer":
        tokenizer.chat_template = JINJA_TEMPLATES.get(processor.template)
    return tokenizer


def build_plain_tower(model: CoatVlm, target: str) -> PreTrainedModel:
    """Build a tower of the remaining blocks on ``meta``; ValueError for other libraries' and types.

    Its final norm is ones and zeros: readers of hidden states never call it.
    """
    vision = model.config.vision_config
    if vision.model_type not in CONTRASTIVE:
        raise ValueError(
            f"--format {target} cannot hold a vision tower of type {vision.model_type!r}; allowed: "
            f"{', '.join(CONTRASTIVE)}; export with --format coat"
        )
    config = copy.deepcopy(vision)
    config.num_hidden_layers = count_needed_layers(
        vision.num_hidden_layers, model.config.select_layer
    )
    if vision.model_type == "siglip_vision_model":
        config.vision_use_head = False  # the pooling head
    with torch.device("meta"):
        return VISION_MODELS[vision.model_type](config).to(model.dtype)


def check_frames(processor: CoatVlmProcessor, target: str) -> None:
    """Raise ValueError if the tokens of a video are means of frames."""
    if "pool_frames" in processor.video:
        raise ValueError(
            f"--format {target}: the model was trained with model.video.pool_frames="
            f"{processor.video['pool_frames']}, and this layout has separate tokens for each frame "
            "of a video; allowed: --format coat"
        )


def rename_tower_weights(
    tower: PreTrainedModel, state: dict[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Rename weights as in published checkpoints, and add the final norm."""
    found = {
        name.removeprefix("vision_model."): w for name, w in select_weights(state, TOWER).items()
    }
    norm = torch.nn.LayerNorm(tower.config.hidden_size, dtype=tower.dtype).state_dict()
    found |= {f"post_layernorm.{name}": value for name, value in norm.items()}
    return {f"{prefix}vision_model.{name}": value for name, value in found.items()}


def build_image_processor(processor: CoatVlmProcessor, model: CoatVlm, *, pad: bool) -> Any:
    """Build transformers' image processor with the same settings and the Pillow backend.

    Loaded without ``backend="pil"``, it uses torchvision, whose resizing differs by 1/255 in
    places.
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
