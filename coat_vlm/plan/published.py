"""Shapes of the published models that built-in recipes name, so that plans need no download.

The values are from the models' ``config.json``.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_vlm.config import LanguageConfig, Recipe
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.model.processor import load_tokenizer

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
    "facebook/dinov2-small": {
        "model_type": "dinov2",
        "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6,
        "image_size": 224, "patch_size": 14,  # the size that its image processor makes
    },
}  # fmt: skip
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
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 1e5, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
TOKENIZERS = {
    "Qwen/Qwen2.5-7B-Instruct": 151665,
    "Qwen/Qwen2.5-1.5B-Instruct": 151665,
    "lmsys/vicuna-7b-v1.5": 32000,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 49152,
}
"""Vocabulary sizes without ``<image>`` by ``model.tokenizer.name_or_path``."""


def use_published_shapes(recipe: Recipe) -> Recipe:
    """Replace the names of published models in a recipe by their configurations.

    Unknown names and local folders are unchanged: transformers reads their ``config.json``. So are
    recipes that start from a whole model.
    """
    if recipe.init_from is not None or recipe.model.pretrained is not None:
        return recipe
    model = recipe.model
    changes: dict[str, Any] = {}
    vision, language, tokenizer = model.vision, model.language, model.tokenizer
    if vision is not None and vision.library == "transformers":
        tower = _find_published(vision.name_or_path, TOWERS)
        if tower is not None:
            changes["vision"] = dataclasses.replace(vision, name_or_path=None, config=dict(tower))
    shape = _find_published(language.name_or_path, LANGUAGES)
    if shape is not None:
        changes["language"] = LanguageConfig(config=dict(shape))
    if tokenizer.train_vocab_size is None:
        tokens = _find_published(tokenizer.name_or_path or language.name_or_path, TOKENIZERS)
        if tokens is not None:
            tokens += vision is not None  # <image>, for every model with a tower
            changes["tokenizer"] = TokenizerConfig(train_vocab_size=tokens)
        elif tokenizer.name_or_path is None:
            # The language model's name, which may be replaced above, also names its tokenizer.
            changes["tokenizer"] = TokenizerConfig(name_or_path=language.name_or_path)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, **changes))


def _find_published(name: str | None, table: Mapping[str, Any]) -> Any:
    return None if name is None or Path(name).exists() else table.get(name)


def find_vocab_size(recipe: Recipe) -> int | None:
    """Return the size of the recipe's tokenizer; the maximum size if the run trains it.

    None for a recipe that starts from a whole model.
    """
    if recipe.init_from is not None or recipe.model.pretrained is not None:
        return None
    if recipe.model.tokenizer.train_vocab_size is not None:
        return recipe.model.tokenizer.train_vocab_size
    return len(load_tokenizer(recipe.model))
