"""Writes the language model alone, as ``AutoModelForCausalLM`` of stock transformers loads it.

Of a model without a vision tower that is all there is. Of a composed one it is the part that a
recipe's ``model.language`` named, as training left it; its tokenizer still has ``<image>``.
"""

import copy
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from coat_vlm.generate import PromptEncoder
from coat_vlm.model import CoatVlm
from coat_vlm.processor import CoatVlmProcessor
from coat_vlm.train.stock_parts import LANGUAGE, chat_template, part_of, with_older_names


def save_language(
    folder: Path, model: CoatVlm, state: dict[str, Tensor], processor: CoatVlmProcessor
) -> None:
    """Write configuration, weights and tokenizer.

    Args:
        folder: an existing, empty folder.
        model: gives the configuration; its weights may be on ``meta``.
        state: the weights by the composed model's names.
        processor: gives the tokenizer and the chat template.
    """
    language: Any = model.language_model
    generation = copy.deepcopy(model.generation_config)
    generation.eos_token_id = PromptEncoder(processor).stop_token_ids
    language.generation_config = generation
    weights = part_of(state, LANGUAGE)
    if language.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    language.save_pretrained(folder, state_dict=weights, save_original_format=False)
    path = folder / "config.json"
    config = with_older_names(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = chat_template(processor)
    tokenizer.save_pretrained(folder)
