"""The model of a recipe's stage as it would stand on a GPU, on ``meta``.

The shapes of the published models that built-in recipes name stand here, so that nobody has to be
asked for them. The numbers are those of the models' ``config.json``; what is not named is
transformers' default of the model type. ``tokens`` is what the model's tokenizer has, without
``<image>``.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from coat_vlm.config import (
    BlockPrecision,
    Fp8Config,
    LanguageConfig,
    Precision,
    Recipe,
    StageConfig,
)
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.fp8 import Arithmetic, convert
from coat_vlm.model.build import frame_of, model_frame
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.pretrained import composed_folder
from coat_vlm.model.processor import prepare_tokenizer, tokenizer_name
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.engine import set_train_mode, set_trainable

TOWERS: dict[str, Mapping[str, Any]] = {
    "Efficient-Large-Model/paligemma-siglip-so400m-patch14-448": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14,
    },
    "openai/clip-vit-large-patch14-336": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
    },
}  # fmt: skip
"""By the names of ``model.vision.name_or_path``."""

_QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip

LANGUAGES: dict[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": _QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "lmsys/vicuna-7b-v1.5": {
        "model_type": "llama",
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""By the names of ``model.language.name_or_path``."""

TOKENIZERS = {
    "Qwen/Qwen2.5-7B-Instruct": 151665,
    "Qwen/Qwen2.5-1.5B-Instruct": 151665,
    "lmsys/vicuna-7b-v1.5": 32000,
}
"""Tokens, by the names of ``model.tokenizer.name_or_path``."""


def with_published_shapes(recipe: Recipe) -> Recipe:
    """The recipe with the configurations of published models in the place of their names.

    Names that are not known here, and local folders of such a name, stay: transformers reads their
    ``config.json``. Only for what needs shapes and no weights.

    Args:
        recipe: any; with ``init_from`` its model is not built, and it stays as it is.
    """
    if recipe.init_from is not None:
        return recipe
    model = recipe.model
    changes: dict[str, Any] = {}
    vision, language, tokenizer = model.vision, model.language, model.tokenizer
    if vision is not None and vision.library == "transformers":
        tower = _known(vision.name_or_path, TOWERS)
        if tower is not None:
            changes["vision"] = dataclasses.replace(vision, name_or_path=None, config=dict(tower))
    shape = _known(language.name_or_path, LANGUAGES)
    if shape is not None:
        changes["language"] = LanguageConfig(config=dict(shape))
    if tokenizer.train_vocab_size is None:
        tokens = _known(tokenizer.name_or_path or language.name_or_path, TOKENIZERS)
        if tokens is not None:
            tokens += vision is not None  # <image>, which every model with a tower gets
            changes["tokenizer"] = TokenizerConfig(train_vocab_size=tokens)
        elif tokenizer.name_or_path is None:
            # The name of the language model, which may be gone now, is its tokenizer's, too.
            changes["tokenizer"] = TokenizerConfig(name_or_path=language.name_or_path)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, **changes))


def _known(name: str | None, table: Mapping[str, Any]) -> Any:
    return None if name is None or Path(name).exists() else table.get(name)


BLOCK_PRECISIONS: tuple[BlockPrecision, ...] = ("bf16", "fp8_linear", "coat", "coat_lean")
"""What the kept activations are compared over."""


def gpu_arithmetic(precision: Precision, fp8: Fp8Config | None) -> Arithmetic:
    """The arithmetic of a recipe on a GPU with FP8 tensor cores; there need not be one."""
    if precision == "fp32":
        return Arithmetic(torch.float32)
    if precision == "bf16":
        return Arithmetic(torch.bfloat16)
    return Arithmetic(torch.bfloat16, (fp8 or Fp8Config()).resolved(precision))


def vocabulary(recipe: Recipe) -> int:
    """Tokens of the recipe's tokenizer; at most, where one is to be trained.

    Raises:
        ValueError: the recipe names no tokenizer.
        OSError: there is none of that name.
    """
    if recipe.model.tokenizer.train_vocab_size is not None:
        return recipe.model.tokenizer.train_vocab_size
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name(recipe.model))
    return len(prepare_tokenizer(tokenizer, images=recipe.model.vision is not None))


def stage_frame(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, vocab_size: int | None
) -> CoatVlm:
    """The model as training would have it at the first step of a stage.

    Args:
        recipe: model and start.
        stage: what trains.
        arithmetic: what is converted.
        vocab_size: see :func:`vocabulary`; None with ``init_from``, which has its own.

    Raises:
        ValueError: the recipe's model cannot be built, or not in this precision.
    """
    if vocab_size is None:
        assert recipe.init_from is not None
        config = CoatVlmConfig.from_pretrained(composed_folder(recipe.init_from))
        config._attn_implementation = recipe.model.attention
        frame = frame_of(config, arithmetic.dtype)
    else:
        frame = model_frame(recipe.model, vocab_size, arithmetic.dtype)
    set_trainable(frame, stage)
    if arithmetic.fp8 is not None:
        convert(frame, arithmetic.fp8)
    set_train_mode(frame, stage)
    return frame
