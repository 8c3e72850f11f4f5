"""Parts of a composed model as stock transformers models, for folders that other programs read.

A cut tower has fewer blocks than its checkpoint and no final norm. It is written as a complete
tower of that many blocks, whose last hidden state is the one that the projector reads; the norm
after it, which no reader of hidden states calls, gets torch's initial values (ones and zeros).

The language model alone is a folder that ``AutoModelForCausalLM`` loads. Of a model without a
vision tower that is all there is. Of a composed one it is the part that a recipe's
``model.language`` named, as training left it; its tokenizer still has ``<image>``.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionModel,
    PretrainedConfig,
    PreTrainedModel,
    SiglipVisionModel,
)

from coat_data.text.chat import VICUNA_SYSTEM
from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.generate import PromptEncoder
from coat_vlm.model import CoatVlm
from coat_vlm.model.configuration import kept_layers
from coat_vlm.model.processor import CoatVlmProcessor

TOWER, PROJECTOR, LANGUAGE = "vision_tower.model.", "projector.layers.", "language_model."

_CONTENT = (
    "{% macro content(message) %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + content(message) "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ content(messages[0]) }}"
    "{% set turns = messages[1:] %}{% else %}"
    + VICUNA_SYSTEM
    + "{% set turns = messages %}{% endif %}{% for turn in turns %}"
    "{% if turn['role'] == 'assistant' %}{{ ' ASSISTANT: ' + content(turn) + eos_token }}"
    "{% else %}{{ (' USER: ' if loop.first else 'USER: ') + content(turn) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT: ' }}{% endif %}"
)
_TEMPLATES = {"chatml": _CONTENT + _CHATML, "vicuna_v1": _CONTENT + _VICUNA}


def part_of(state: dict[str, Tensor], prefix: str, new: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, named with ``new`` in its place."""
    return {
        new + name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def plain_tower(model: CoatVlm, target: str) -> PreTrainedModel:
    """The tower as a complete one of transformers with the blocks that are left; on ``meta``.

    Args:
        model: the composed model.
        target: the format that is written, for the error.

    Raises:
        ValueError: the tower is one of open_clip.
    """
    vision = model.config.vision_config
    classes = {"siglip_vision_model": SiglipVisionModel, "clip_vision_model": CLIPVisionModel}
    if vision.model_type not in classes:
        raise ValueError(
            f"--format {target} cannot hold a vision tower of type {vision.model_type!r}; allowed: "
            f"{', '.join(classes)}; export with --format coat"
        )
    config = copy.deepcopy(vision)
    config.num_hidden_layers = kept_layers(vision.num_hidden_layers, model.config.select_layer)
    if vision.model_type == "siglip_vision_model":
        config.vision_use_head = False  # the pooling head
    with torch.device("meta"):
        return classes[vision.model_type](config).to(model.dtype)


def tower_weights(
    model: CoatVlm, tower: PreTrainedModel, state: dict[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """The tower's weights by the names of published checkpoints, the final norm among them.

    Published CLIP and SigLIP checkpoints have ``vision_model.`` before every name; transformers 5
    has it no longer in memory and reads both.

    Args:
        model: gives the dtype of what is filled in.
        tower: :func:`plain_tower`.
        state: the composed model's weights.
        prefix: put before every name.
    """
    found = {name.removeprefix("vision_model."): w for name, w in part_of(state, TOWER).items()}
    norm = torch.nn.LayerNorm(tower.config.hidden_size, dtype=model.dtype).state_dict()
    found |= {f"post_layernorm.{name}": value for name, value in norm.items()}
    return {f"{prefix}vision_model.{name}": value for name, value in found.items()}


def with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A language model's configuration that transformers 4 understands, too.

    transformers 5 writes ``rope_parameters``, of which version 4 knows nothing: it would compute
    with a RoPE base of 10,000 without a word. Version 5 reads the older names as well.
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


def older_dtype(config: PretrainedConfig) -> dict[str, Any]:
    """``to_dict`` with ``torch_dtype``, version 4's name of ``dtype``."""
    values = config.to_dict()
    return values | {"torch_dtype": values["dtype"]} if values.get("dtype") else values


def chat_template(processor: CoatVlmProcessor) -> str | None:
    """The model's chat template in Jinja, for messages of text and of parts.

    Args:
        processor: gives the template's name and the tokenizer.

    Returns:
        None for ``plain``, whose prompt is the image alone. A begin-of-text token is left to the
        tokenizer, which puts it before every text.
    """
    tokenizer: Any = processor.tokenizer
    if processor.template == "tokenizer":
        return tokenizer.chat_template
    return _TEMPLATES.get(processor.template)


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
    save_stock(folder, model, model.language_model, part_of(state, LANGUAGE), processor)
    config = with_older_names(read_json(folder / "config.json"))
    write_config(folder / "config.json", config)
    tokenizer_with_template(processor).save_pretrained(folder)


def save_stock(
    folder: Path,
    model: CoatVlm,
    stock: Any,
    weights: dict[str, Tensor],
    processor: CoatVlmProcessor | None = None,
) -> None:
    """Write a stock model that generates as a composed one does.

    Args:
        folder: an existing, empty folder.
        model: gives the settings of generation.
        stock: its weights may be on ``meta``.
        weights: by the stock model's names.
        processor: gives the tokens that end an answer; those of the settings when absent.
    """
    stock.generation_config = copy.deepcopy(model.generation_config)
    if processor is not None:
        stock.generation_config.eos_token_id = PromptEncoder(processor).stop_token_ids
    if stock.config.tie_word_embeddings:
        heads = [name for name in weights if name.endswith("lm_head.weight")]
        weights = {name: weight for name, weight in weights.items() if name not in heads}
    stock.save_pretrained(folder, state_dict=weights, save_original_format=False)


def tokenizer_with_template(processor: CoatVlmProcessor) -> Any:
    """A copy of the tokenizer, with the model's chat template."""
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = chat_template(processor)
    return tokenizer


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write a config.json as transformers does."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
