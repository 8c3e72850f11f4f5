"""Merges an adapter folder in peft's layout into a loaded model, and takes it out again.

The folder has adapter_config.json and adapter_model.safetensors: LoRA or DoRA matrices, and the
full weights of other trained modules (peft's ``modules_to_save``).
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from coat_vlm.model.lora import find_scale, merge

logger = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_LORA = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
# Settings of peft's LoRA that merge() does not compute.
_UNSUPPORTED = (
    *("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices"),
    *("alora_invocation_tokens", "target_parameters", "use_qalora"),
)
# Values of init_lora_weights that leave the base weights unchanged.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


@contextmanager
def merged_adapter(model: nn.Module, folder: Path, base: str) -> Iterator[None]:
    """Merge an adapter until the end of the context; the originals stay in host memory."""
    adapter = _Adapter(model, folder, base)
    parameters = adapter.parameters
    before = {name: parameters[name].detach().to("cpu", copy=True) for name in adapter.changed}
    try:
        adapter.merge()
        yield
    finally:
        with torch.no_grad():
            for name, tensor in before.items():
                parameters[name].copy_(tensor)


def merge_adapter(model: nn.Module, folder: Path, base: str) -> None:
    """Merge an adapter into a model's weights, which then equal the weights of ``coat-vlm export``.

    Warns about an adapter of another base than ``base``; ValueError if it does not fit the model.
    """
    _Adapter(model, folder, base).merge()


class _Adapter:
    """The weights of an adapter folder, and the parameters of a model that they change."""

    def __init__(self, model: nn.Module, folder: Path, base: str) -> None:
        self._folder, self._config = folder, read_adapter_config(folder)
        named = self._config.get("base_model_name_or_path")
        if named and named != base and Path(named).resolve() != Path(base).resolve():
            logger.warning("%s was trained on %s and is used with %s", folder, named, base)
        self._layers, self._others = _read_weights(folder)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.changed = [f"{layer}.weight" for layer in self._layers] + list(self._others)
        missing = [name for name in self.changed if name not in self.parameters]
        if missing:
            raise ValueError(f"{folder} does not fit {base}, which has no {missing[0]}; {_REMEDY}")
        _check_shared(self.parameters, self.changed, self._others, folder)

    @torch.no_grad()
    def merge(self) -> None:
        """Change the parameters; ValueError if a shape differs."""
        for layer, adapter in self._layers.items():
            weight = self.parameters[f"{layer}.weight"]
            _merge_layer(weight, layer, adapter, self._config, self._folder)
        for name, tensor in self._others.items():
            _check_shape(self.parameters[name], tensor.shape, name, self._folder)
            self.parameters[name].copy_(tensor)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; ValueError if there is none that can be merged here."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        inner = folder / "adapter"
        hint = f"; did you mean {inner}?" if (inner / ADAPTER_CONFIG).is_file() else ""
        raise ValueError(f"{folder} is not an adapter folder: it has no {ADAPTER_CONFIG}{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}; {_SAVE}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} has a JSON {type(config).__name__}, not an object; {_SAVE}")
    wrong = {name: config[name] for name in _UNSUPPORTED if config.get(name)}
    if config.get("peft_type") != "LORA":
        wrong["peft_type"] = config.get("peft_type")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        wrong["init_lora_weights"] = config["init_lora_weights"]
    if wrong:
        found = ", ".join(f"{name}: {value!r}" for name, value in wrong.items())
        raise ValueError(f"{path} has {found}, which cannot be merged here; {_MERGE}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{path} has r: {rank!r} and lora_alpha: {alpha!r}; r must be a number of columns "
            f"and lora_alpha a number; {_SAVE}"
        )
    return config


_MERGE = "merge it with peft's merge_and_unload, and give the merged folder as the model"
_SAVE = "save the adapter again with peft's save_pretrained"
_REMEDY = "give the folder that the adapter was trained on as the model"


def _read_weights(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Read the adapters by layer, and the full weights of other modules by name."""
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    others: dict[str, Tensor] = {}
    path = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {_SAVE}") from error
    if not tensors:
        raise ValueError(f"{path} has no weights; {_SAVE}")
    for saved, tensor in tensors.items():
        name = saved.removeprefix(PEFT_PREFIX)
        # peft saves the lengths of DoRA without this ending.
        name += ".weight" if name.endswith(".lora_magnitude_vector") else ""
        layer, _, kind = name.partition(".lora_")
        if not kind and ".base_layer." not in name:
            others[name] = tensor
        elif f"lora_{kind}" in _LORA:
            layers[layer][name] = tensor
        else:
            raise ValueError(f"{folder} has {saved}, which cannot be merged here; {_MERGE}")
    return layers, others


def _merge_layer(
    weight: Tensor,
    layer: str,
    adapter: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: Path,
) -> None:
    """Replace a layer's weight [N, K] by its sum with an adapter."""
    a, b, lengths = (adapter.get(f"{layer}.{name}") for name in _LORA)
    dora = bool(config.get("use_dora"))
    if a is None or b is None or dora != (lengths is not None):
        raise ValueError(
            f"{folder}: {layer} has {', '.join(adapter)}; use_dora: {dora} needs lora_A, "
            f"lora_B and {'' if dora else 'no '}lora_magnitude_vector; {_SAVE}"
        )
    if not len(a) == b.shape[1] == config["r"]:
        raise ValueError(
            f"{folder}: {ADAPTER_CONFIG} has r: {config['r']}, and {layer} has {len(a)} rows in "
            f"lora_A and {b.shape[1]} columns in lora_B; {_SAVE}"
        )
    _check_shape(weight, torch.Size((len(b), a.shape[1])), layer, folder)
    state = {f"{layer}.weight": weight}
    merge(state, {name: one.to(weight.device) for name, one in adapter.items()}, find_scale(config))
    weight.copy_(state[f"{layer}.weight"])


def _check_shared(
    parameters: Mapping[str, Tensor], changed: list[str], full: Mapping[str, Tensor], folder: Path
) -> None:
    for name in changed:
        others = [n for n, one in parameters.items() if one is parameters[name] and n != name]
        alike = name in full and all(n in full and full[name].equal(full[n]) for n in others)
        if others and not alike:
            raise ValueError(
                f"{folder} changes {name}, which shares its weights with {', '.join(others)} "
                "(tie_word_embeddings); give a merged model in which each has its own weights as "
                "the model, without --adapters"
            )


def _check_shape(weight: Tensor, shape: torch.Size, name: str, folder: Path) -> None:
    if weight.shape != shape:
        raise ValueError(
            f"{folder}: {name} is for a weight of {tuple(shape)}, and the model's has "
            f"{tuple(weight.shape)}; {_REMEDY}"
        )
