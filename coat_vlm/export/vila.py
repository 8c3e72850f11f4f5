"""Writes and reads VILA's three folders ``llm/``, ``vision_tower/`` and ``mm_projector/``.

Layout and fields follow NVlabs/VILA, ``llava/model/llava_arch.py`` (``save_pretrained``),
``configuration_llava.py`` and ``multimodal_projector/base_projector.py``. VILA's ``patch`` drops
the first feature of every tower. SigLIP's is a patch, so SigLIP towers have ``cls_patch``.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from coat_vlm.config import ImageConfig, LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.model import ProjectorConfig, VideoConfig
from coat_vlm.export.folder import write_config, write_model
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
from coat_vlm.model import CoatVlm, build_model
from coat_vlm.model.pretrained import load_auto, readable_errors
from coat_vlm.model.processor import CoatVlmProcessor, build_processor, prepare_tokenizer
from coat_vlm.model.projector import PROJECTOR_TYPES

PARTS = ("llm", "vision_tower", "mm_projector")

_SAME_PROJECTORS = {"mlp_downsample_2x2_fix": "mlp_downsample"}
_WEIGHTS = "model.safetensors"
_DTYPES = ("float16", "bfloat16", "float32")


def save_vila(
    folder: Path, model: CoatVlm, processor: CoatVlmProcessor, state: dict[str, Tensor]
) -> None:
    """Write the three folders and config.json; ValueError if VILA does not support the model."""
    check_frames(processor, "vila")
    tower = build_plain_tower(model, "vila")
    llm, vision, projector = (folder / part for part in PARTS)
    language: Any = model.language_model
    save_stock(llm, model, language, make_tokenizer(processor), select_weights(state, LANGUAGE))
    images = build_image_processor(processor, model, pad=False)
    write_model(vision, tower, images, rename_tower_weights(tower, state, ""), rename=False)
    projector.mkdir()
    layers = select_weights(state, PROJECTOR, "layers.")
    layers = {name: tensor.contiguous() for name, tensor in layers.items()}
    save_file(layers, projector / _WEIGHTS, metadata={"format": "pt"})
    dtype, config = str(model.dtype).removeprefix("torch."), model.config
    named = {"torch_dtype": dtype}  # version 4's name of dtype
    described = {
        "llm_cfg": add_legacy_names(language.config.to_dict() | named),
        "vision_tower_cfg": tower.config.to_dict() | named,
        "mm_projector_cfg": {
            "architectures": ["MultimodalProjector"],
            "mm_projector_type": config.projector_type,
            "model_type": "v2l_projector",
            "torch_dtype": dtype,
        },
    }
    for part, values in zip((llm, vision, projector), described.values(), strict=True):
        write_config(part / "config.json", values)
    scales = config.s2_scales
    keeps_all = config.select_feature == "cls_patch" or config.num_prefix_tokens == 0
    top = {
        "architectures": ["LlavaLlamaModel"],
        "model_type": "llava_llama",
        "model_dtype": f"torch.{dtype}",
        "hidden_size": config.text_config.hidden_size,
        "mm_hidden_size": config.feature_size,
        "mm_vision_select_layer": -1,
        "mm_vision_select_feature": "cls_patch" if keeps_all else "patch",
        "image_aspect_ratio": processor.image_mode,
        "min_tiles": processor.image_min_tiles,
        "max_tiles": processor.image_max_tiles,
        "num_video_frames": processor.video.get("num_frames", 8),
        "s2": False,
        "dynamic_s2": scales is not None,
        "s2_scales": None if scales is None else ",".join(map(str, scales)),
        "s2_max_split_size": None if scales is None else scales[0],
        "s2_resize_output_to_scale_idx": -1 if scales is not None else 0,
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "resume_path": None,
    }
    write_config(folder / "config.json", top | described)


def is_vila(folder: Path) -> bool:
    """Return whether a folder has VILA's three folders."""
    return all((folder / part / "config.json").is_file() for part in PARTS)


def load_vila(folder: Path, dtype: torch.dtype | None = None) -> tuple[CoatVlm, CoatVlmProcessor]:
    """Load the composed model and its processor from VILA's three folders, on the CPU.

    A tokenizer without a chat template is VILA 1.5's, which was trained with Vicuna's. Raises
    ValueError if files are damaged or missing, or the checkpoint is not supported.
    """
    top = _read(folder / "config.json")
    tokenizer = prepare_tokenizer(load_auto(AutoTokenizer, folder / "llm"))
    recipe = _read_model_config(
        folder, top, "tokenizer" if tokenizer.chat_template else "vicuna_v1"
    )
    stored = str(top.get("model_dtype", "float16")).removeprefix("torch.")
    if stored not in _DTYPES:
        raise ValueError(
            f"{folder}/config.json: model_dtype is {stored!r}; allowed: {', '.join(_DTYPES)}"
        )
    dtype = dtype or getattr(torch, stored)
    model = build_model(recipe, tokenizer, dtype)
    config: Any = model.config
    projector = folder / "mm_projector"
    assert model.projector is not None, "the recipe above has a tower"
    with readable_errors(str(projector)):
        model.projector.load_state_dict(load_file(projector / _WEIGHTS))
    return model, build_processor(recipe, tokenizer, config)


def _read_model_config(
    folder: Path, top: dict[str, Any], template: Literal["tokenizer", "vicuna_v1"]
) -> ModelConfig:
    vision = _read(folder / "vision_tower" / "config.json")
    has_class_token = vision.get("model_type") in ("clip_vision_model", "clip")
    feature = top.get("mm_vision_select_feature") or "patch"
    if feature == "patch" and not has_class_token:
        raise ValueError(
            f"{folder}/config.json: mm_vision_select_feature is patch, with which VILA drops the "
            f"first patch of a tower without a class token ({vision.get('model_type')}); allowed "
            "for such a tower: cls_patch; set it if the model was trained with all patches"
        )
    found = _read(folder / "mm_projector" / "config.json").get("mm_projector_type")
    projector: Any = _SAME_PROJECTORS.get(str(found), found)
    if projector not in PROJECTOR_TYPES:
        raise ValueError(
            f"{folder}/mm_projector/config.json: mm_projector_type is {found!r}; allowed: "
            f"{', '.join([*PROJECTOR_TYPES, *_SAME_PROJECTORS])}"
        )
    return ModelConfig(
        vision=VisionConfig(
            name_or_path=str(folder / "vision_tower"),
            select_layer=top.get("mm_vision_select_layer", -2),
            select_feature=feature if has_class_token else "patch",
        ),
        language=LanguageConfig(name_or_path=str(folder / "llm")),
        projector=ProjectorConfig(type=projector),
        image=_read_image_config(folder, top),
        video=VideoConfig(num_frames=top.get("num_video_frames")),
        template=template,
    )


def _read_image_config(folder: Path, top: dict[str, Any]) -> ImageConfig:
    mode: Any = top.get("image_aspect_ratio") or "resize"
    if top.get("s2"):
        raise ValueError(
            f"{folder}/config.json: s2 is true (scales of the whole image); allowed: false, or "
            "dynamic_s2"
        )
    if mode not in ("resize", "pad", "dynamic", "dynamic_s2"):
        raise ValueError(
            f"{folder}/config.json: image_aspect_ratio is {mode!r}; allowed: resize, pad, dynamic, "
            "dynamic_s2"
        )
    settings: dict[str, Any] = {"mode": mode}
    if mode in ("dynamic", "dynamic_s2"):
        settings["max_tiles"] = top.get("max_tiles")
    if mode == "dynamic":
        settings["min_tiles"] = top.get("min_tiles")
    if mode == "dynamic_s2":
        scales = str(top.get("s2_scales"))
        if not all(scale.strip().isdecimal() for scale in scales.split(",")):
            raise ValueError(
                f"{folder}/config.json: s2_scales is {scales}; required with dynamic_s2: sides in "
                'pixels, such as "448,896,1344"'
            )
        settings["s2_scales"] = tuple(map(int, scales.split(",")))
    return ImageConfig(**settings)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; required: a VILA checkpoint with config.json, "
            f"{', '.join(f'{part}/' for part in PARTS)}"
        ) from error
