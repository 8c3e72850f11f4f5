"""The one writer of model folders: configuration, generation settings, processor and weights.

transformers' ``save_pretrained`` is not called: it refuses generation settings that it has read and
that training completed, and writes a published model's files in the form of its own version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coat_vlm.checkpoint.atomic_folder import write_json
from coat_vlm.model.lora import split_adapters
from coat_vlm.model.pretrained import TENSORS

_NOT_TRAINED = ("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path")
_SHARD_SIZE = "5GB"  # of the published folders


def write_model(
    folder: Path,
    model: PreTrainedModel,
    processor: Any,
    weights: Mapping[str, Tensor] | None = None,
    *,
    rename: bool = True,
) -> None:
    """Write a folder that ``from_pretrained`` loads; of ``processor``, what it saves itself.

    ``weights`` are those of all names of the model, without adapters, and tied names share one
    tensor (:func:`share_tied`), which is written once. With ``rename``, tensors get the names of
    the folder that the model was loaded from. Without weights, the list of these names by
    parameter is written instead (None for a tied one), and ``model`` may be on ``meta``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder / "config.json", _describe(model))
    if model.can_generate() and (settings := _describe_generation(model)):
        write_config(folder / "generation_config.json", settings)
    processor.save_pretrained(folder)
    if weights is None:
        write_json(folder / TENSORS, list_tensors(model))
        return
    tensors = _drop_tied(weights)
    if rename:
        tensors = _rename(model, tensors)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=_SHARD_SIZE)
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].contiguous() for name in names}
        write_tensors(folder / file, shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_config(folder / "model.safetensors.index.json", index)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; of tensors on ``meta``, only check that it could be written.

    Raises ValueError if two of these share memory, which safetensors refuses.
    """
    if not any(tensor.is_meta for tensor in tensors.values()):
        save_file(tensors, path, {"format": "pt"})
        return
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
        other = first.setdefault(memory, name)
        if other != name:
            raise ValueError(f"{path.name} would have {other} and {name}, which share memory")


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write config.json, or another JSON file, in transformers' format."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    """Return config.json; a published model's own one, with what differs from it."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    raw = _read_base(model, "config.json")
    if raw:
        read = type(config).from_dict(raw).to_dict()
        return _set_dtype(_keep_unchanged(raw, read, config.to_dict()), dtype)
    named = {"architectures": [type(model).__name__], "dtype": dtype}
    return dict(sorted((config.to_diff_dict() | named).items()))


def _describe_generation(model: PreTrainedModel) -> dict[str, Any]:
    """Return generation_config.json; a published model's own one, empty if it has none."""
    settings = model.generation_config
    assert settings is not None
    if not hasattr(model, "base_files"):
        return settings.to_diff_dict()
    raw = _read_base(model, "generation_config.json")
    default = GenerationConfig.from_model_config(model.config)
    read = GenerationConfig.from_dict(raw) if raw else default
    return _keep_unchanged(raw, read.to_dict(), settings.to_dict())


def _read_base(model: PreTrainedModel, name: str) -> dict[str, Any]:
    return json.loads(getattr(model, "base_files", {}).get(name, "{}"))


def _keep_unchanged(raw: Any, read: Any, values: Any) -> Any:
    """Return the file ``raw`` with the ``values`` that differ from what is ``read`` from it."""
    if not all(isinstance(value, dict) for value in (raw, read, values)):
        return values
    changed = {name for name in values if values[name] != read.get(name)} - {*_NOT_TRAINED}
    return raw | {
        name: _keep_unchanged(raw.get(name), read.get(name), values[name])
        for name in sorted(changed)
    }


def _set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    # Where the folder has one; torch_dtype is transformers 4's name.
    changed = dict(config)
    for name, value in config.items():
        if isinstance(value, dict):
            changed[name] = _set_dtype(value, dtype)
        elif name in ("dtype", "torch_dtype") and value is not None:
            changed[name] = dtype
    return changed


def share_tied(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Share one tensor among all names of a tied parameter, so that it is saved once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original in state:
            state[name] = state[original]
    return state


def list_tensors(model: PreTrainedModel) -> dict[str, str | None]:
    """Return the name in a folder's files by name of the model; None for a tied tensor's others."""
    own = dict(model.named_parameters(remove_duplicate=False))
    state = {
        # ZeRO-3's parameters are empty; experts are split by their shape.
        name: torch.empty(getattr(own.get(name), "ds_shape", tensor.shape), device="meta")
        for name, tensor in model.state_dict().items()
    }
    named, _ = split_adapters(state)
    written = _rename(model, _drop_tied(share_tied(named, model)))
    names = {id(tensor): name for name, tensor in written.items()}
    found = {name: names.get(id(tensor)) for name, tensor in _drop_tied(named).items()}
    return {name: found.get(name) for name in named}


def _drop_tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[int, str] = {}
    return {n: tensor for n, tensor in weights.items() if first.setdefault(id(tensor), n) == n}


def _rename(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    names = _read_base(model, TENSORS)
    if not names:
        return revert_weight_conversion(model, weights)
    return {names[name] or name: tensor for name, tensor in weights.items()}
