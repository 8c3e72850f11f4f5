"""The families of published vision-language models that ``model.pretrained`` trains.

A family's official checkpoints and the folders that training writes have the same layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from coat_vlm.config import MODULES, ModuleName
from coat_vlm.model.pretrained import read_config

_GRIDS = ("pixel_values", "image_grid_thw")
_VIDEO_GRIDS = ("pixel_values_videos", "video_grid_thw")
_RATE = {"fps": "fps", "max_frames": "max_frames", "num_frames": "max_frames"}
_NUMBER = {"num_frames": "num_frames"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """How a family takes videos."""

    inputs: tuple[str, ...] = ()
    """Inputs of the model for videos; empty if frames are inputs, and have tokens, as images do."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Frames that the publishers sample, if the files of the video processor do not say it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names of the processor's settings by keys of ``model.video``."""
    limits_frames: bool = True
    """Whether ``size.longest_edge`` is that of a frame, not of a whole video (Qwen3-VL)."""
    timed: bool = True
    """Whether the model gets the times of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models; its parts are names of modules and parameters."""

    name: str
    model_class: str
    """transformers' class of the whole model."""
    vision: tuple[str, ...] = ("model.vision_tower",)
    """Names that a model lacks are left out."""
    projector: tuple[str, ...] = ("model.multi_modal_projector",)
    language: tuple[str, ...] = ("model.language_model", "lm_head")
    inputs: tuple[str, ...] = ("pixel_values",)
    """Outputs of the image processor that the model takes."""
    token_types: str | None = None
    """Input of the model that is 1 at image tokens, 2 at video tokens and 0 elsewhere, if any."""
    videos: Videos | None = None
    """None for a family without videos."""
    limits_pixels: bool = False
    """Whether the image processor shrinks images to at most ``size.longest_edge`` pixels."""
    boxes: Literal["fractions", "thousandths", "tagged thousandths", "pixels"] = "fractions"
    """How the family's publishers write boxes, if they do; ``pixels`` of the resized image."""
    adds_end_token: bool = False
    """Whether the tokenizer's end token is added to answers, as the chat template has none."""

    @property
    def parts(self) -> dict[ModuleName, tuple[str, ...]]:
        """Names by part of the model."""
        return {"vision": self.vision, "projector": self.projector, "language": self.language}


_IDEFICS: dict[str, Any] = {
    "vision": ("model.vision_model",),
    "projector": ("model.connector",),
    "language": ("model.text_model", "lm_head"),
    "inputs": ("pixel_values", "pixel_attention_mask"),
}
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        name="Gemma 3", model_class="Gemma3ForConditionalGeneration", token_types="token_type_ids"
    ),
    "idefics3": Family(name="Idefics3", model_class="Idefics3ForConditionalGeneration", **_IDEFICS),
    "internvl": Family(
        name="InternVL3",
        model_class="InternVLForConditionalGeneration",
        videos=Videos(  # as its model card
            sampling={"num_frames": 8}, settings=_NUMBER, timed=False
        ),
        boxes="tagged thousandths",  # internvl.readthedocs.io, get_started/chat_data_format
    ),
    "llava": Family(
        name="LLaVA-1.5", model_class="LlavaForConditionalGeneration", adds_end_token=True
    ),
    "llava_onevision": Family(
        name="LLaVA-OneVision",
        model_class="LlavaOnevisionForConditionalGeneration",
        projector=("model.multi_modal_projector", "model.image_newline"),
        inputs=("pixel_values", "image_sizes", "batch_num_images"),
        videos=Videos(  # LLaVA-VL/LLaVA-NeXT, scripts/train/finetune_onevision.sh
            inputs=("pixel_values_videos", "video_frames"),
            sampling={"num_frames": 32},
            settings=_NUMBER,
            timed=False,
        ),
    ),
    "qwen2_5_vl": Family(
        name="Qwen2.5-VL",
        model_class="Qwen2_5_VLForConditionalGeneration",
        vision=("model.visual.patch_embed", "model.visual.blocks"),
        projector=("model.visual.merger",),
        inputs=_GRIDS,
        videos=Videos(  # QwenLM/Qwen2.5-VL, qwen-vl-utils/src/qwen_vl_utils/vision_process.py
            inputs=(*_VIDEO_GRIDS, "second_per_grid_ts"),
            sampling={"fps": 2.0},
            settings=_RATE,
        ),
        token_types="mm_token_type_ids",
        limits_pixels=True,
        boxes="pixels",  # QwenLM/Qwen2.5-VL, cookbooks/spatial_understanding.ipynb
    ),
    "qwen3_vl": Family(
        name="Qwen3-VL",
        model_class="Qwen3VLForConditionalGeneration",
        vision=("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
        projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
        inputs=_GRIDS,
        videos=Videos(
            inputs=_VIDEO_GRIDS, sampling={"fps": 2.0}, settings=_RATE, limits_frames=False
        ),
        token_types="mm_token_type_ids",
        limits_pixels=True,
        boxes="thousandths",  # QwenLM/Qwen3-VL, cookbooks/2d_grounding.ipynb
    ),
    "smolvlm": Family(
        name="SmolVLM2",
        model_class="SmolVLMForConditionalGeneration",
        videos=Videos(sampling={"fps": 1.0, "num_frames": 64}),
        **_IDEFICS,
    ),
}
"""Family by the ``model_type`` of config.json."""


def find_family(where: str, path: str) -> tuple[Family, Any]:
    """Return a checkpoint's family and configuration, or raise ValueError that names ``where``."""
    config = read_config(where, path)
    family = FAMILIES.get(config.model_type)
    if family is not None:
        return family, config
    names = ", ".join(f"{one.name} ({kind})" for kind, one in FAMILIES.items())
    nearest = (
        "continue from it with init_from, next to model.vision and model.language"
        if config.model_type == "coat_vlm"
        else "take its language model or vision tower as a part of a new model, with model.language"
        ".name_or_path and model.vision.name_or_path"
    )
    raise ValueError(
        f"{where}={path!r} is a checkpoint of model_type {config.model_type!r}; the families that "
        f"can be trained are {names}; {nearest}"
    )


class ModelPart(nn.Module):
    """The modules and parameters of one part of a model, which stay in the model as well."""


def find_parts(model: PreTrainedModel, family: Family) -> dict[ModuleName, nn.Module]:
    """Return vision, projector and language; ValueError if a parameter is in none or in two."""
    parts: dict[ModuleName, nn.Module] = {}
    for role in MODULES:
        part = parts[role] = ModelPart()
        for name in family.parts[role]:
            owner, _, last = name.rpartition(".")
            child = getattr(model.get_submodule(owner), last, None)
            if isinstance(child, nn.Parameter):
                part.register_parameter(name.replace(".", "_"), child)
            elif child is not None:
                part.add_module(name.replace(".", "_"), child)
    found = [id(parameter) for part in parts.values() for parameter in part.parameters()]
    if sorted(found) != sorted(map(id, model.parameters())):
        raise ValueError(
            f"{type(model).__name__} has other parts than {family.name} in the tested version of "
            "transformers; install that version (constraints.txt)"
        )
    return parts
