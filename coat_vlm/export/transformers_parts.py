"""What all layouts for other programs share; and ``language``, for ``AutoModelForCausalLM``."""

import copy
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.generate import set_stop_tokens
from coat_vlm.model import CoatVlm
from coat_vlm.model.chat_templates import JINJA_TEMPLATES
from coat_vlm.model.processor import CoatVlmProcessor

LANGUAGE = "language_model."
"""Prefix of the language model's weights in a composed model."""


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
    return config | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scales else None,
    }


def save_language(
    folder: Path, model: CoatVlm, state: dict[str, Tensor], processor: CoatVlmProcessor
) -> None:
    """Write configuration, weights and tokenizer."""
    save_stock(folder, model, model.language_model, select_weights(state, LANGUAGE), processor)
    write_config(folder, add_legacy_names(read_json(folder / "config.json")))
    make_tokenizer(processor).save_pretrained(folder)


def save_stock(
    folder: Path,
    model: CoatVlm,
    stock: Any,
    weights: dict[str, Tensor],
    processor: CoatVlmProcessor,
) -> None:
    """Write a stock model with a composed model's generation settings and stop tokens."""
    stock.generation_config = copy.deepcopy(model.generation_config)
    set_stop_tokens(stock, processor)
    if stock.config.tie_word_embeddings:
        heads = [name for name in weights if name.endswith("lm_head.weight")]
        weights = {name: weight for name, weight in weights.items() if name not in heads}
    stock.save_pretrained(folder, state_dict=weights, save_original_format=False)


def make_tokenizer(processor: CoatVlmProcessor) -> Any:
    """Copy the tokenizer, and set the model's chat template in Jinja; none for ``plain``.

    It contains no begin-of-text token, because the tokenizer adds it to every text.
    """
    tokenizer: Any = copy.deepcopy(processor.tokenizer)
    if processor.template != "tokenizer":
        tokenizer.chat_template = JINJA_TEMPLATES.get(processor.template)
    return tokenizer


def write_config(folder: Path, values: dict[str, Any]) -> None:
    """Write config.json in transformers' format."""
    text = json.dumps(values, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
