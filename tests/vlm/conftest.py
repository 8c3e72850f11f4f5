"""Tiny models and a tokenizer: large enough to be wrong, small enough to be fast."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_data.load.encode import Encoder
from coat_data.media.image import ImageTransform
from coat_data.sample import Media, Part, Sample, Turn
from coat_data.text.chat import get_template
from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.model import ProjectorConfig, TokenizerConfig
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model import CoatVlmConfig, build_model
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer

_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_OPEN_CLIP = {
    "clip": {"image_size": 28, "patch_size": 7, "width": 24, "layers": 3, "head_width": 12},
    # timm's smallest SigLIP-like ViT: no class token, attention pooling.
    "timm": {"image_size": 32, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "avg"},
}
_WORDS = ["What colour is the ball on the left?", "red green blue", "Is there a dog? yes no"]
_SMALL_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SMALL_LANGUAGE = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


_OTHER = {
    "dinov2": {"mlp_ratio": 2},
    "dinov2_with_registers": {"mlp_ratio": 2, "num_register_tokens": 4},
    "dinov3_vit": {"num_register_tokens": 4, "pos_embed_rescale": None},
    "vit": {},
}


def _vision(kind="siglip", **changes):
    if kind not in _OTHER:
        return {"model_type": f"{kind}_vision_model"} | _TOWER | changes
    values = {"model_type": kind} | _TOWER | _OTHER[kind] | changes
    return {
        k: v for k, v in values.items() if k != "intermediate_size" or "mlp_ratio" not in values
    }


def _language(kind="qwen2", **changes):
    values = {"model_type": kind} | _LANGUAGE | changes
    return values if kind != "qwen2" else {k: v for k, v in values.items() if k != "head_dim"}


def _recipe(
    vision: Any = None,
    language: Any = None,
    projector: Any = "mlp_downsample",
    attn_implementation: Any = "sdpa",
    **tower: Any,
):
    tower.setdefault("config", vision or _vision())
    return ModelConfig(
        vision=VisionConfig(**tower),
        language=LanguageConfig(config=language or _language()),
        projector=ProjectorConfig(type=projector),
        attn_implementation=attn_implementation,
    )


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """60 words; 0 is padding, 1 the end token, 2 the image placeholder."""
    words = ["<pad>", "<eos>", "<image>", *(f"w{index}" for index in range(57))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>"},
    )


@pytest.fixture(scope="session")
def tiny(tiny_tokenizer):
    """Functions that make tiny configurations, recipes and models."""

    def model(*args, seed=0, **kwargs):
        torch.manual_seed(seed)
        return build_model(_recipe(*args, **kwargs), tiny_tokenizer).eval()

    return SimpleNamespace(
        vision=_vision,
        language=_language,
        recipe=_recipe,
        model=model,
        open_clip=_OPEN_CLIP,
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint of random weights with ChatML, in the layout of a run."""
    torch.manual_seed(0)
    config = ModelConfig(
        vision=VisionConfig(config=_SMALL_TOWER),
        language=LanguageConfig(config=_SMALL_LANGUAGE),
        tokenizer=TokenizerConfig(train_vocab_size=300),
        max_length=128,
    )
    tokenizer = prepare_tokenizer(train_tokenizer(_WORDS, 300))
    model = build_model(config, tokenizer)
    with torch.no_grad():  # larger weights than at the start of training: answers that differ
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
    folder = tmp_path_factory.mktemp("run") / "sft" / "model"
    processor = build_processor(config, tokenizer, cast(CoatVlmConfig, model.config))
    processor.adopt_template(None)  # this and the next line: as a stage does
    set_stop_tokens(model, processor)
    model.bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _picture(number: int) -> Media:
    pixels = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return Media(kind="image", path=f"{number}.png", data=file.getvalue())


@pytest.fixture
def run_without_waits():
    """A function that runs another twice; the second time, a wait for the GPU is an error."""

    def run(work):
        work()  # what the first call sets up may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.fixture
def conversations(tiny_tokenizer):
    """A function from a model to five encoded conversations, with 1, 0, 2, 0 and 1 images."""

    def encoded(model):
        encoder = Encoder(
            tiny_tokenizer,
            get_template("plain", tiny_tokenizer),
            ImageTransform(28, (0.5,) * 3, (0.5,) * 3),
            tokens_per_image=model.config.tokens_per_image,
            image_token_id=model.config.image_token_id,
        )
        found = []
        for number, count in enumerate((1, 0, 2, 0, 1)):
            words = " ".join(f"w{(7 * number + word) % 50 + 1}" for word in range(2 + 3 * number))
            turns = (
                Turn("user", (Part("image"),) * count + (Part("text", "w3"),)),
                Turn("assistant", (Part("text", words),)),
            )
            media = tuple(_picture(10 * number + place) for place in range(count))
            sample = Sample(id=str(number), turns=turns, media=media)
            size = encoder.measure(sample)
            found.append(encoder(sample))
            assert size[:2] == (len(found[-1].input_ids), len(found[-1].pixel_values))
        return found

    return encoded
