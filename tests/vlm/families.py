"""Small models of transformers' VLM families with random weights, and a batch for each."""

from collections.abc import Callable
from typing import Any

import torch
from one_block import randomized
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

IMAGE_TOKEN = 250
SIDE = 64
"""Pixels; patches have 8, so that there are 64."""

TEXT = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 144,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.06,
}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 144,
    "num_heads": 2,  # of 72 channels, as in Qwen3-VL: no power of two
    "patch_size": 8,
    "out_hidden_size": 128,
    "initializer_range": 0.06,
}

Batch = dict[str, Any]


def qwen3_vl() -> tuple[Any, Batch]:
    vision = {"intermediate_size": 320, "num_position_embeddings": 64}
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 32, "rope_parameters": rope | {"rope_theta": 1e4}},
        vision_config=QWEN_TOWER | vision | {"deepstack_visual_indexes": [0]},
        image_token_id=IMAGE_TOKEN,
    )
    return make(config), qwen_batch()


def qwen2_5_vl() -> tuple[Any, Batch]:
    # As 3420 in its 7B model, 300 is no multiple of 16. Windows have 2 x 2 merged patches.
    vision = {"intermediate_size": 300, "window_size": 32, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=QWEN_TOWER | vision,
        image_token_id=IMAGE_TOKEN,
    )
    return make(config), qwen_batch()


def llava_onevision() -> tuple[Any, Batch]:
    config = LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=siglip(),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[SIDE, SIDE]],
    )
    # The whole image and one tile, whose rows end with a newline token.
    images = {"pixel_values": pixels(1, 2), "image_sizes": torch.tensor([[SIDE, SIDE]])}
    return make(config), batch([64 + 72]) | images


def llava() -> tuple[Any, Batch]:
    config = LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        image_token_index=IMAGE_TOKEN,
    )
    return make(config), batch([64]) | {"pixel_values": pixels(1)}


def internvl(**vision: Any) -> tuple[Any, Batch]:
    sizes = {"image_size": [SIDE, SIDE], "patch_size": [8, 8], "attention_bias": True}
    config = InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=TOWER | sizes | {"model_type": "internvl_vision"} | vision,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    return make(config), batch([16]) | {"pixel_values": pixels(1)}


def internvl_6b() -> tuple[Any, Batch]:
    """With the tower of InternVL3-78B: RMSNorm, also of queries and keys, no biases."""
    return internvl(norm_type="rms_norm", use_qk_norm=True, attention_bias=False)


def smolvlm() -> tuple[Any, Batch]:
    config = SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER,
        image_token_id=IMAGE_TOKEN,
    )
    return make(config), idefics_batch()


def idefics3() -> tuple[Any, Batch]:
    config = Idefics3Config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER,
        image_token_id=IMAGE_TOKEN,
    )
    return make(config), idefics_batch()


def gemma3() -> tuple[Any, Batch]:
    text = {
        "head_dim": 48,
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = Gemma3Config(
        text_config=TEXT | text,
        vision_config=siglip(),
        mm_tokens_per_image=16,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=251,
        eoi_token_index=252,
    )
    model = make(config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    made = batch([16]) | {"pixel_values": pixels(1)}
    return model, made | {"token_type_ids": (made["input_ids"] == IMAGE_TOKEN).long()}


FAMILIES: dict[str, Callable[[], tuple[Any, Batch]]] = {
    made.__name__: made
    for made in (
        *(qwen3_vl, qwen2_5_vl, llava_onevision, llava),
        *(internvl, internvl_6b, smolvlm, idefics3, gemma3),
    )
}


def siglip() -> dict[str, Any]:
    return TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}


def make(config: Any) -> Any:
    gemma = isinstance(config, Gemma3Config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    randomized(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "cls_token")):
            # Otherwise a first block would add many times what it reads. Gemma scales by 128^(1/2).
            nn.init.normal_(parameter, std=128**-0.5 if gemma else 1.0)
        elif parameter.ndim == 1 and gemma and "language_model" in name:
            nn.init.normal_(parameter, std=0.1)  # added to one
    return model


def pixels(*images: int) -> Tensor:
    return torch.randn(*images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))


def batch(images: list[int], length: int = 48) -> Batch:
    """Two rows: text with images of so many tokens; text alone, shorter and padded."""
    generator = torch.Generator().manual_seed(4)
    rows = [
        torch.cat([torch.tensor([IMAGE_TOKEN] * n + [5]) for n in images]),
        torch.empty(0, dtype=torch.long),
    ]
    rows = [torch.cat([row, torch.randint(3, 240, (length,), generator=generator)]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE_TOKEN), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def qwen_batch() -> Batch:
    """Two images of 8 x 12 and 4 x 8 patches, of which 2 x 2 are merged into a token."""
    grid = torch.tensor([[1, 8, 12], [1, 4, 8]])
    made = batch([24, 8])
    patches = torch.randn(128, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(3))
    kinds = (made["input_ids"] == IMAGE_TOKEN).int()
    return made | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def idefics_batch() -> Batch:
    """One image that does not fill its square; its padding is masked in the tower."""
    images, mask = pixels(2, 1), torch.ones(2, 1, SIDE, SIDE, dtype=torch.bool)
    images[1] = 0.0  # a row without images has an empty one
    mask[0, :, :, 48:] = False
    return batch([16]) | {"pixel_values": images, "pixel_attention_mask": mask}
