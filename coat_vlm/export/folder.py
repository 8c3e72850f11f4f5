"""The one writer of model folders: configuration, generation settings, processor and weights.

transformers' ``save_pretrained`` is not called: it rejects generation settings that it has read and
that training completed, and writes a published model's files in the format of its own version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coat_vlm.checkpoint.atomic_folder import write_json
from coat_vlm.model.lora import split_adapters
from coat_vlm.model.pretrained import TENSORS

_NOT_TRAINED = ("architectures", "transformers_version", "_name_or_path")
INDEX = "model.safetensors.index.json"
_SHARD_SIZE = "5GB"  # of the published folders


def write_model(
    folder: Path,
    model: PreTrainedModel,
    processor: Any,
    weights: Mapping[str, Tensor] | None = None,
    *,
    rename: bool = True,
) -> None:
    """Write a folder that ``from_pretrained`` loads, with what ``processor`` saves.

    ``weights`` has a tensor for each name in the model's state dict, without adapters; tied names
    share one tensor (:func:`share_tied`), which is written once. ``rename`` gives tensors the names
    of the folder that the model was loaded from. Without weights, these names are written to
    tensors.json if the model is a published one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder / "config.json", _describe(model))
    if model.can_generate() and not hasattr(model, "base_files"):
        assert model.generation_config is not None
        values = model.generation_config.to_diff_dict()
        write_config(folder / "generation_config.json", values)
    processor.save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"
    if not hasattr(model, "base_files") and tokenizer.is_file():
        # The name in transformers 5 of a class that both versions know by this one.
        text = tokenizer.read_text(encoding="utf-8")
        tokenizer.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    if weights is None:
        if hasattr(model, "base_files"):
            own = dict(model.named_parameters(remove_duplicate=False))
            state = {  # ZeRO-3's parameters are empty, and experts are split by their shape
                name: torch.empty(getattr(own.get(name), "ds_shape", t.shape), device="meta")
                for name, t in model.state_dict().items()
            }
            named = share_tied(split_adapters(state)[0], model)
            names = {id(tensor): name for name, tensor in _rename(model, named).items()}
            write_json(folder / TENSORS, {name: names.get(id(t)) for name, t in named.items()})
        return
    tensors = _rename(model, weights) if rename else _drop_tied(weights)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=_SHARD_SIZE)
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].contiguous() for name in names}
        write_tensors(folder / file, shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_config(folder / INDEX, index)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; with tensors on ``meta``, only check that it could be written.

    Raises ValueError if two of these share memory, which safetensors rejects.
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
    """Return config.json: a published model's own one, with what training changed."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    text = getattr(model, "base_files", {}).get("config.json")
    if text is not None:
        raw = json.loads(text)
        raw.pop("quantization_config", None)  # the weights were decompressed
        read = type(config).from_dict(json.loads(text))
        return _update(raw, read.to_dict(), config.to_dict(), dtype)
    named = {"architectures": [type(model).__name__], "dtype": dtype}
    return dict(sorted((config.to_diff_dict() | named).items()))


def _update(
    raw: dict[str, Any], read: dict[str, Any], values: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """Return a file with the ``values`` that differ from those ``read`` from it.

    Older files have a part's values at the top, where transformers 5 has them as well.
    """
    updated = dict(raw)
    new = [n for n in sorted(values.keys() - raw.keys()) if not isinstance(values[n], dict)]
    for name in [*raw, *new]:
        old, before, after = raw.get(name), read.get(name), values.get(name)
        if isinstance(old, dict) and isinstance(before, dict) and isinstance(after, dict):
            updated[name] = _update(old, before, after, dtype)
        elif name in ("dtype", "torch_dtype"):  # the latter is transformers 4's name
            updated |= {name: dtype} if old is not None else {}
        elif after != before and name not in _NOT_TRAINED:
            updated[name] = after
    return updated


def share_tied(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Share one tensor among all names of a tied parameter, so that it is saved once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original in state:
            state[name] = state[original]
    return state


def _drop_tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[int, str] = {}
    return {n: tensor for n, tensor in weights.items() if first.setdefault(id(tensor), n) == n}


def _rename(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in the folder that the model was loaded from."""
    names = json.loads(getattr(model, "base_files", {}).get(TENSORS, "{}"))
    names |= {f"{name}_scale": f"{own}_scale" for name, own in names.items() if own}  # compressed
    tensors = _drop_tied(weights)
    # transformers reads both layouts, other loaders the published one.
    ends: tuple[str, ...] = getattr(getattr(model, "family", None), "swapped", ())
    swapped = {n: tensors.pop(n).transpose(1, 2) for n in [*tensors] if n.endswith(ends)}
    renamed = {names[name]: tensors.pop(name) for name in [*tensors] if names.get(name)}
    # Splits experts, which have no name.
    return renamed | swapped | revert_weight_conversion(model, tensors)
