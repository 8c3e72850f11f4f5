"""The families of published vision-language models that ``model.pretrained`` trains.

A family's official checkpoints and the folders that training writes have the same layout.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from coat_vlm.config import MODULES, ModuleName
from coat_vlm.model.pretrained import read_config

_VIDEO_GRIDS = ("pixel_values_videos", "video_grid_thw")
_FRAME_POSITIONS = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
_RATE = {"fps": "fps", "max_frames": "max_frames", "num_frames": "max_frames"}
_NUMBER = {"num_frames": "num_frames"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """How a family takes videos."""

    inputs: tuple[str, ...] = ()
    """Inputs of the model for videos; empty if frames are inputs, and have tokens, as images do."""
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Frames that the publishers sample, if the files of the video processor do not say it."""
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names of the processor's settings by keys of ``model.video``."""
    limits_frames: bool = True
    """Whether ``size.longest_edge`` limits a frame, and not a whole video as in Qwen3-VL."""
    timed: bool = True
    """Whether the model gets the times of frames."""
    frames: str | None = None
    """None if the processor takes videos. Otherwise frames are images of a conversation, and each
    comes after this text, in which ``{}`` is its time in seconds."""


_FRAMES = Videos(frames="", sampling={"num_frames": 8}, settings=_NUMBER, timed=False)


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
    videos: Videos = _FRAMES
    shares_tokens: bool = True
    """Whether ranks can share the tokens of a sequence. They cannot where tokens attend to later
    ones, such as within an image, or where another loss, such as the experts', reads all tokens."""
    has_prefix: bool = False
    """Whether ``token_types`` is 0 up to the first answer, where attention is in both directions,
    and 1 from there on."""
    template: str | None = None
    """Chat template of a family whose publishers give none."""
    limits_pixels: bool = False
    """Whether the image processor shrinks images to at most ``size.longest_edge`` pixels."""
    reads_patches: bool = False
    """Whether the tower reads patches of images that keep their size, and not tiles of one size."""
    frames_per_image: int = 1
    """Frames as which the image processor counts the pixels of an image."""
    boxes: Literal["fractions", "thousandths", "tagged thousandths", "pixels"] = "fractions"
    """How the family's publishers write boxes, if they do; ``pixels`` of the resized image."""
    adds_end_token: bool = False
    """Whether the tokenizer's end token is added to answers, as the chat template has none."""
    swapped: tuple[str, ...] = ()
    """Ends of names of parameters (E, N, K) that the publishers' files have as (E, K, N)."""

    @property
    def is_known(self) -> bool:
        """Whether it is one of :data:`FAMILIES`; the parts of others are found by a rule."""
        return self in FAMILIES.values()

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
_QWEN: dict[str, Any] = {
    "vision": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
    "projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    "inputs": ("pixel_values", "image_grid_thw"),
    "token_types": "mm_token_type_ids",
    "limits_pixels": True,
    "reads_patches": True,
}
_QWEN3: dict[str, Any] = {
    **_QWEN,
    "videos": Videos(
        inputs=_VIDEO_GRIDS, sampling={"fps": 2.0}, settings=_RATE, limits_frames=False
    ),
    "boxes": "thousandths",  # QwenLM/Qwen3-VL, cookbooks/2d_grounding.ipynb
}
_GLM: dict[str, Any] = {
    **{name: _QWEN[name] for name in ("inputs", "token_types", "limits_pixels", "reads_patches")},
    "vision": tuple(
        f"model.visual.{name}"
        for name in ("embeddings", "patch_embed", "post_conv_layernorm", "blocks", "post_layernorm")
    ),
    "projector": ("model.visual.downsample", "model.visual.merger"),
    "frames_per_image": 2,
    # Each two frames are an image with its own grid, between texts with their time.
    "videos": Videos(sampling={"fps": 2.0}),
}
_PALIGEMMA = (
    "{% if messages | length > 2 or messages[0]['role'] != 'user' %}"
    "{{ raise_exception('one question and one answer are the whole conversation') }}{% endif %}"
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "{{ bos_token if message['role'] == 'user' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{{ '\\n' if message['role'] == 'user' else eos_token }}{% endfor %}"
)
"""PaliGemmaProcessor's format: images, the begin-of-text token, question, line break; answer."""
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        name="Gemma 3",
        model_class="Gemma3ForConditionalGeneration",
        token_types="token_type_ids",
        # huggingface.co/spaces/huggingface-projects/gemma-3-12b-it
        videos=replace(_FRAMES, frames="Frame {}:", timed=True),
        shares_tokens=False,
    ),
    "gemma4": Family(
        name="Gemma 4",
        model_class="Gemma4ForConditionalGeneration",
        vision=("model.vision_tower", "model.audio_tower"),
        projector=("model.embed_vision", "model.embed_audio"),
        inputs=("pixel_values", "image_position_ids"),
        token_types="mm_token_type_ids",
        videos=Videos(inputs=_FRAME_POSITIONS, settings=_NUMBER),
        reads_patches=True,
        shares_tokens=False,
    ),
    "glm46v": Family(name="GLM-4.6V", model_class="Glm46VForConditionalGeneration", **_GLM),
    "glm4v": Family(name="GLM-4.1V", model_class="Glm4vForConditionalGeneration", **_GLM),
    "idefics3": Family(name="Idefics3", model_class="Idefics3ForConditionalGeneration", **_IDEFICS),
    "internvl": Family(
        name="InternVL3",
        model_class="InternVLForConditionalGeneration",
        videos=Videos(  # as its model card
            sampling={"num_frames": 8}, settings=_NUMBER, timed=False
        ),
        boxes="tagged thousandths",  # internvl.readthedocs.io, get_started/chat_data_format
    ),
    "lfm2_vl": Family(
        name="LFM2-VL",
        model_class="Lfm2VlForConditionalGeneration",
        inputs=("pixel_values", "pixel_attention_mask", "spatial_shapes"),
        reads_patches=True,
    ),
    "llava": Family(
        name="LLaVA-1.5", model_class="LlavaForConditionalGeneration", adds_end_token=True
    ),
    "llava_next": Family(
        name="LLaVA-NeXT",
        model_class="LlavaNextForConditionalGeneration",
        projector=("model.multi_modal_projector", "model.image_newline"),
        inputs=("pixel_values", "image_sizes"),
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
    "mistral3": Family(
        name="Mistral 3",
        model_class="Mistral3ForConditionalGeneration",
        inputs=("pixel_values", "image_sizes"),
        reads_patches=True,
    ),
    "paligemma": Family(
        name="PaliGemma",
        model_class="PaliGemmaForConditionalGeneration",
        token_types="token_type_ids",
        shares_tokens=False,
        has_prefix=True,
        template=_PALIGEMMA,
    ),
    "qwen2_5_vl": Family(
        name="Qwen2.5-VL",
        model_class="Qwen2_5_VLForConditionalGeneration",
        videos=Videos(  # QwenLM/Qwen2.5-VL, qwen-vl-utils/src/qwen_vl_utils/vision_process.py
            inputs=(*_VIDEO_GRIDS, "second_per_grid_ts"),
            sampling={"fps": 2.0},
            settings=_RATE,
        ),
        boxes="pixels",  # QwenLM/Qwen2.5-VL, cookbooks/spatial_understanding.ipynb
        **_QWEN,
    ),
    "qwen2_vl": Family(
        name="Qwen2-VL",
        model_class="Qwen2VLForConditionalGeneration",
        videos=Videos(inputs=_VIDEO_GRIDS, sampling={"fps": 2.0}, settings=_RATE),
        boxes="thousandths",  # arXiv:2409.12191, section 2.2.1, which has them between tags
        **_QWEN,
    ),
    "qwen3_5": Family(name="Qwen3.5", model_class="Qwen3_5ForConditionalGeneration", **_QWEN3),
    "qwen3_vl": Family(name="Qwen3-VL", model_class="Qwen3VLForConditionalGeneration", **_QWEN3),
    "qwen3_vl_moe": Family(
        name="Qwen3-VL-MoE",
        model_class="Qwen3VLMoeForConditionalGeneration",
        swapped=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        shares_tokens=False,
        **_QWEN3,
    ),
    "smolvlm": Family(
        name="SmolVLM2",
        model_class="SmolVLMForConditionalGeneration",
        videos=Videos(sampling={"fps": 1.0, "num_frames": 64}),
        **_IDEFICS,
    ),
}
"""Family by the ``model_type`` of config.json."""


def is_published(model_type: str | None) -> bool:
    """Return whether transformers has a vision-language model of this type."""
    return model_type != "coat_vlm" and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def find_family(where: str, path: str) -> tuple[Family, Any]:
    """Return a checkpoint's family and configuration, or raise ValueError that names ``where``.

    The parts of a model that is not in :data:`FAMILIES` are found by :func:`derive_family`.
    """
    config = read_config(where, path)
    kind = config.model_type
    family = FAMILIES.get(kind)
    if family is not None:
        return family, config
    if is_published(kind):
        try:
            return derive_family(config), config
        except ValueError as error:
            raise ValueError(
                f"{where}={path!r} is a checkpoint of model_type {kind!r}, whose parts "
                f"do not have the usual names of transformers' models: {error}; known families: "
                f"{_list_families()}"
            ) from error
    nearest = (
        "continue from it with init_from, next to model.vision and model.language"
        if kind == "coat_vlm"
        else "take its language model or vision tower as a part of a new model, with model.language"
        ".name_or_path and model.vision.name_or_path"
    )
    raise ValueError(
        f"{where}={path!r} is a checkpoint of model_type {kind!r}; the families that "
        f"can be trained are {_list_families()}; {nearest}"
    )


def _list_families() -> str:
    return ", ".join(f"{one.name} ({kind})" for kind, one in FAMILIES.items())


_PROJECTORS = re.compile(
    "projector|projection|connector|merger|aligner|resampler|downsample|newline|embed_"
)
_TOWERS = re.compile("tower|vision|visual|encoder")


def derive_family(config: Any) -> Family:
    """Find the parts of a model by the names and accessors that transformers' models have.

    ``get_encoder("image")`` is the tower and ``get_decoder()`` the language model. Another
    module or parameter of the model or the tower is part of the projector if its name says so.
    Raises ValueError with what is not found.
    """
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    tower, decoder = model.get_encoder("image"), model.get_decoder()
    inner = {id(module): set(map(id, module.modules())) for module in (tower, decoder)}
    if id(model) in inner or id(tower) in inner[id(decoder)] or id(decoder) in inner[id(tower)]:
        raise ValueError("it has no vision tower next to a language model")
    inputs = tuple(inspect.signature(type(model).forward).parameters)
    if "decoder_input_ids" in inputs:
        raise ValueError("its language model has an encoder, which reads the question")
    roles = {id(tower): "vision", id(decoder): "language"}
    roles[id(model.get_output_embeddings())] = "language"
    found: dict[str, list[str]] = {role: [] for role in MODULES}

    def assign(module: nn.Module, prefix: str, default: str | None) -> None:
        for last, child in (*module.named_children(), *module.named_parameters(recurse=False)):
            own = set(map(id, child.modules())) if isinstance(child, nn.Module) else set()
            role = roles.get(id(child)) or ("projector" if _PROJECTORS.search(last) else default)
            split = child is tower and any(_PROJECTORS.search(n) for n, _ in tower.named_children())
            if split or (id(child) not in roles and own & roles.keys()):
                assert isinstance(child, nn.Module)
                assign(child, f"{prefix}{last}.", "vision" if split else None)
            elif role or _TOWERS.search(last):
                found[role or "vision"].append(prefix + last)
            elif isinstance(child, nn.Parameter) or any(True for _ in child.parameters()):
                raise ValueError(f"{prefix}{last} is not in any part")

    assign(model, "", None)
    names = {id(module): name for name, module in model.named_modules()}
    language = sorted(found["language"], key=lambda name: name != names[id(decoder)])
    types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in inputs]
    return Family(
        name=type(model).__name__.removesuffix("ForConditionalGeneration"),
        model_class=type(model).__name__,
        vision=tuple(found["vision"]),
        projector=tuple(found["projector"]),
        language=tuple(language),
        inputs=inputs,
        token_types=types[0] if types else None,
    )


def find_parts(model: PreTrainedModel, family: Family) -> dict[ModuleName, nn.Module]:
    """Return vision, projector and language; ValueError if a parameter is in none or in two."""
    parts: dict[ModuleName, nn.Module] = {}
    for role in MODULES:
        part = parts[role] = nn.Module()
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
            f"{type(model).__name__} has different parts than {family.name} in the tested version "
            "of transformers; install that version (constraints.txt)"
        )
    return parts
