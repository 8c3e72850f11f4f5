"""Reads the model of a checkpoint, of any number of ranks and ZeRO stage."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.checkpoint.metadata import Contents, read_contents
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.model.adapter_folder import ADAPTER_CONFIG, merge_adapter
from coat_vlm.model.folder import load_model
from coat_vlm.model.lora import find_scale, merge, split_adapters
from coat_vlm.model.named_model import NamedModel

ADAPTER = "adapter"
"""Folder of the adapter next to the config.json of a stage's model."""


def load_named_model(named: NamedModel, dtype: Any, attention: str | None = None) -> Any:
    """Load a model with all weights; dtype ``auto``: as stored. ValueError: damaged."""
    state = None
    if named.checkpoint is not None:
        problem = find_damage(named.checkpoint)
        if problem is not None:
            raise ValueError(f"{named.checkpoint} is damaged: {problem}; give another checkpoint")
        contents = read_contents(named.checkpoint)
        known = dtype if isinstance(dtype, torch.dtype) else None
        state = read_merged_weights(named.checkpoint, named.folder, contents, known)
    model: PreTrainedModel = load_model(named.folder, dtype, attention, state)
    if named.adapter is not None:
        merge_adapter(model, named.adapter, str(named.checkpoint or named.folder))
    return model


def read_merged_weights(
    checkpoint: Path, described: Path, contents: Contents, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Read a checkpoint's weights, with the adapters of the model in ``described`` merged."""
    state = read_weights(checkpoint, contents, dtype)
    adapter = read_trained_adapter(described)
    if adapter is not None:
        state, adapters = split_adapters(state)
        merge(state, adapters, find_scale(adapter))
    return state


def read_trained_adapter(described: Path) -> dict[str, Any] | None:
    """Read the adapter_config.json of a stage that trained adapters; None of another stage."""
    path = described / ADAPTER / ADAPTER_CONFIG
    return read_json(path) if path.is_file() else None


def read_weights(
    checkpoint: Path, contents: Contents, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Read a checkpoint's parameters, by default in their dtype of training, and its buffers."""
    shards = Shards(checkpoint)
    state: dict[str, Tensor] = {}
    parameters = contents.parameters.items()
    for name, saved in tqdm(parameters, desc="reading", unit="tensor", delay=2.0, leave=False):
        target = dtype or getattr(torch, saved.dtype)
        # The master weights round to the same BF16 weights, except for ties.
        master = target != torch.bfloat16
        state[name] = shards.read_parameter(name, saved.shape, master=master).to(target)
    return state | {
        name: shards.read_parameter(name, shape) for name, shape in contents.buffers.items()
    }
