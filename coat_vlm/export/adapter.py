"""LoRA adapters as a folder that stock peft loads: adapter_config.json, adapter_model.safetensors.

    PeftModel.from_pretrained(CoatVlm.from_pretrained(BASE), FOLDER)

gives the model of the end of the stage: the adapters of the language model, and beside them the
other modules that trained, whole (peft's ``modules_to_save``). BASE is the folder that the stage
began from; adapter_config.json names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.checkpoint.shards import save_tensors
from coat_vlm.model.lora import adapter_config
from coat_vlm.model.vlm import CoatVlm

ADAPTER = "adapter"
"""The folder beside a model's or a description's config.json."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before the names of the model's own modules."""


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """adapter_config.json, as far as it is needed here."""

    config: dict[str, Any]

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.config["lora_alpha"] / self.config["r"]

    @property
    def base(self) -> Path | None:
        """The folder that the stage began from, if it is still there."""
        name = self.config["base_model_name_or_path"]
        return Path(name) if name and (Path(name) / "config.json").is_file() else None


def save_adapter_config(folder: Path, model: CoatVlm) -> SavedAdapter:
    """Write adapter_config.json of a model's adapters.

    Args:
        folder: made if it is not there.
        model: with adapters; its weights may be anywhere.
    """
    adapter_config(model).save_pretrained(folder)
    return _read(folder)


def read_adapter(described: Path) -> SavedAdapter | None:
    """The adapters beside a config.json; None if there are none."""
    folder = described / ADAPTER
    return _read(folder) if (folder / _CONFIG).is_file() else None


def _read(folder: Path) -> SavedAdapter:
    return SavedAdapter(read_json(folder / _CONFIG))


def adapter_weights(
    saved: SavedAdapter, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of adapter_model.safetensors by peft's names.

    Args:
        saved: names the other modules that trained.
        base: of :func:`coat_vlm.model.lora.separated`.
        adapters: likewise.
    """
    whole = tuple(f"{name}." for name in saved.config["modules_to_save"] or ())
    others = {name: tensor for name, tensor in base.items() if name.startswith(whole)}
    return {_PREFIX + name: tensor for name, tensor in {**adapters, **others}.items()}


def read_adapter_weights(described: Path) -> dict[str, Tensor]:
    """The tensors of the adapters beside a config.json, by peft's names."""
    return load_file(described / ADAPTER / _WEIGHTS)


def save_adapter(
    folder: Path, saved: SavedAdapter, weights: Mapping[str, Tensor], base: Path | None = None
) -> None:
    """Write the folder.

    Args:
        folder: made if it is not there.
        saved: its configuration.
        weights: of :func:`adapter_weights`.
        base: named as what the adapters belong to; what ``saved`` names when absent.

    Raises:
        OSError: it could not be written.
    """
    folder.mkdir(exist_ok=True)
    config = dict(saved.config)
    if base is not None:
        config["base_model_name_or_path"] = str(base)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / _CONFIG).write_text(text, encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_tensors(tensors, folder / _WEIGHTS, {"format": "pt"})
