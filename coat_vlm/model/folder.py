"""Loads models and processors that training wrote, composed ones and published families."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from coat_vlm.config import Recipe
from coat_vlm.model.build import create_meta_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.families import FAMILIES, find_family, is_published
from coat_vlm.model.family_model import create_meta_family_model, load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.named_model import NamedModel, find_model
from coat_vlm.model.pretrained import check_composed_folder, load_auto
from coat_vlm.model.processor import CoatVlmProcessor, continue_processor
from coat_vlm.model.vlm import CoatVlm

AnyProcessor = CoatVlmProcessor | FamilyProcessor
"""The processor of a composed model, or of a published one."""


def is_family(folder: str | Path) -> bool:
    """Return whether a folder contains a model of a published family."""
    if not (Path(folder) / "config.json").is_file():
        return False
    try:
        found, _ = PretrainedConfig.get_config_dict(str(folder))
    except OSError:
        return False  # the loader of composed models names what is wrong
    return is_published(found.get("model_type"))


def takes_videos(name: str) -> bool:
    """Return whether a folder, or a model of the Hub, has its own videos and is not quantized."""
    try:
        found, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return False  # the loader names what is wrong
    family = FAMILIES.get(found.get("model_type", ""))
    own = family is not None and family.videos.frames is None
    return own and "quantization_config" not in found


def load_model(
    folder: str | Path,
    dtype: Any,
    attention: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Load a folder's model, with the weights of ``state`` if it is given.

    dtype ``auto`` is the dtype of the weights. ValueError if the model is missing or incomplete.
    """
    if is_family(folder):
        return load_family_model("the model", str(folder), dtype, attention, state)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if state is None:
        return CoatVlm.from_pretrained(str(folder), dtype=dtype, local_files_only=True, **options)
    config = CoatVlmConfig.from_pretrained(folder)
    model = CoatVlm.from_pretrained(None, config=config, dtype=dtype, state_dict=state, **options)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_processor(folder: str | Path) -> AnyProcessor:
    """Load the processor of a model folder; ValueError for missing or damaged files."""
    if is_family(folder):
        return FamilyProcessor.load("the model", str(folder))
    try:
        return load_auto(CoatVlmProcessor, str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: the processor cannot be loaded: {error}") from error


def create_meta_copy(
    folder: str | Path, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """Create the model that the configuration of a folder describes, on ``meta``."""
    if is_family(folder):
        return create_meta_family_model("the model", str(folder), dtype, attention)
    config = CoatVlmConfig.from_pretrained(folder)
    if attention is not None:
        config._attn_implementation = attention
    model = create_meta_model(config, dtype)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def check_start(recipe: Recipe, start: str) -> NamedModel:
    """Return the model from which a recipe starts; ValueError if it does not fit."""
    try:
        named = find_model(Path(start))
    except FileNotFoundError as error:
        raise ValueError(f"init_from={start!r}: {error}") from error
    if recipe.model.pretrained is None:
        check_composed_folder(str(named.folder))
        return named
    family, _ = find_family("model.pretrained", recipe.model.pretrained)
    found, _ = find_family("init_from", str(named.folder))
    if found != family:
        raise ValueError(
            f"init_from={start!r} contains a {found.name}, and model.pretrained="
            f"{recipe.model.pretrained!r} is a {family.name}; name a folder of the same family"
        )
    return named


def start_processor(recipe: Recipe, start: str | None) -> AnyProcessor:
    """Load the processor of a stage that starts from a folder, with the recipe's settings.

    Without a folder, ``model.pretrained`` is read.
    """
    source = ("model.pretrained", str(recipe.model.pretrained))
    if start is not None:
        source = ("init_from", start := str(find_model(Path(start)).folder))
    if start is None or recipe.model.pretrained is not None:
        own = recipe.model.max_length, recipe.model.max_pixels, recipe.model.video
        return FamilyProcessor.load(*source, *own)
    saved = load_auto(CoatVlmProcessor, start)
    return continue_processor(recipe.model, saved, CoatVlmConfig.from_pretrained(start))
