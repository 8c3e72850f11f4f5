"""Models of transformers' VLM families, as wide as FP8 needs, and a batch for each."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from family_folders import MAKERS
from one_block import randomized
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from coat_vlm.model.families import FAMILIES as PUBLISHED

FAMILIES = sorted([*MAKERS, "internvl_6b"])
TEXT = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.06}
TOWER = {"hidden_size": 144, "intermediate_size": 320, "initializer_range": 0.06}
PARTIAL = {"partial_rotary_factor": 0.5}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl": {
        "text_config": {"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}},
        # Heads of 72 channels, as in Qwen3-VL: no power of two.
        "vision_config": {"out_hidden_size": 128},
    },
    "qwen3_vl_moe": {
        "text_config": {
            "head_dim": 32,
            "rope_parameters": ROPE | {"mrope_section": [6, 5, 5]},
            "moe_intermediate_size": 96,
        },
        "vision_config": {"out_hidden_size": 128},
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        # As 3420 in its 7B model, 300 is no multiple of 16.
        "vision_config": {"out_hidden_size": 128, "intermediate_size": 300},
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        "vision_config": {"embed_dim": 144, "hidden_size": 128},
    },
    "internvl": {"vision_config": {"attention_bias": True}},
    # The tower of InternVL3-78B: RMSNorm, also of queries and keys, no biases.
    "internvl_6b": {"vision_config": {"norm_type": "rms_norm", "use_qk_norm": True}},
    "glm4v": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]} | PARTIAL},
        # The MLP of its tower is as wide as the decoder, and the merger as intermediate_size.
        "vision_config": {"out_hidden_size": 128, "image_size": 16},
    },
    "gemma4": {"text_config": {"head_dim": 32, "global_head_dim": 64}},
    "mistral3": {"text_config": {"head_dim": 32}, "vision_config": {"head_dim": 72}},
    "paligemma": {"text_config": {"vocab_size": 2048, "head_dim": 48}},
    "qwen3_5": {
        "text_config": {
            "head_dim": 32,
            "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]} | PARTIAL,
        },
        "vision_config": {"out_hidden_size": 128},
    },
    "gemma3": {"text_config": {"head_dim": 48, "query_pre_attn_scalar": 64}},
}
CHANGES["glm46v"] = CHANGES["glm4v"]  # the same classes of blocks
Batch = dict[str, Any]


@functools.cache
def _open(family: str) -> tuple[Any, Any]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        MAKERS[family.removesuffix("_6b")](folder)
        processor = AutoProcessor.from_pretrained(folder)
        processor.chat_template = processor.chat_template or PUBLISHED["paligemma"].template
        return AutoConfig.from_pretrained(folder), processor


def build(family: str) -> tuple[Any, Batch]:
    """A random model, and two rows: two images with text; a shorter text, padded on the right."""
    config, processor = _open(family)
    settings, changes = config.to_dict(), CHANGES.get(family, {})
    for part, sizes in (("text_config", TEXT), ("vision_config", TOWER)):
        settings[part] |= sizes | changes.get(part, {}) | {"tie_word_embeddings": False}
    settings |= {"tie_word_embeddings": False, "projection_dim": 128}
    model = make(type(config).from_dict(settings))
    text = {"type": "text", "text": "What color is the circle? " * 4}
    asked: list[Any] = [[{"type": "image"}, {"type": "image"}, text], [text]]
    chats = [[{"role": "user", "content": content}] for content in asked]
    texts = [processor.apply_chat_template(chat) for chat in chats]
    draw = np.random.default_rng(3)
    images = [
        Image.fromarray(draw.integers(0, 256, (24, width, 3), dtype=np.uint8)) for width in (40, 24)
    ]
    options = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    batch = dict(processor(text=texts, images=[images, []], **options))
    ids, image_id = batch["input_ids"], processor.image_token_id
    batch["labels"] = ids.masked_fill((batch["attention_mask"] == 0) | (ids == image_id), -100)
    return model, batch


def make(config: Any) -> Any:
    gemma = config.model_type.startswith(("gemma", "paligemma"))
    torch.manual_seed(0)
    attention = "eager" if config.model_type == "paligemma" else "sdpa"  # which has no soft cap
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    randomized(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "cls_token")):
            # Otherwise a first block would add many times what it reads. Gemma scales by 128^(1/2).
            nn.init.normal_(parameter, std=128**-0.5 if gemma else 1.0)
        elif parameter.ndim == 1 and gemma and "language_model" in name:
            nn.init.normal_(parameter, std=0.1)  # added to one
        elif name.endswith("mm_input_projection_weight"):
            nn.init.normal_(parameter, std=0.1)
    return model
