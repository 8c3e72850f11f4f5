"""Reads a composed checkpoint whose linear layers are compressed (:mod:`.compressed`).

The weights are decompressed one by one while they are read, so the model in memory is an ordinary
one: it can be trained, converted and saved. compressed-tensors itself is not needed.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from coat_vlm.model.compressed import Scheme, dequantize, scheme_of

_SCALE = ".weight_scale"


def compression_of(folder: str | Path) -> Scheme | None:
    """How the weights of a folder are compressed; None where they are not, or it is no folder.

    Raises:
        ValueError: they are, in a way that is not known here.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None  # whoever reads the configuration says so
    found = config.get("quantization_config")
    return None if found is None else scheme_of(found, str(path))


def compressed_layers(folder: Path) -> list[str]:
    """Names of the modules whose weights are compressed."""
    names = (name for file in _files(folder) for name in _names(file))
    return sorted(name.removesuffix(_SCALE) for name in names if name.endswith(_SCALE))


def arguments_of(
    folder: Path, scheme: Scheme, config: Any, dtype: torch.dtype | str | None
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load the decompressed weights in place of a folder.

    Args:
        folder: the checkpoint.
        scheme: how it is compressed.
        config: the model's configuration; it is changed, so that what is saved later is plain.
        dtype: of the weights; that of the other weights where ``auto`` or absent.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    chosen = dtype if isinstance(dtype, torch.dtype) else config.dtype
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": chosen,
        "state_dict": dict(_decompressed(folder, scheme, chosen)),
    }
    if (folder / "generation_config.json").is_file():
        arguments["generation_config"] = GenerationConfig.from_pretrained(folder)
    return arguments


def _decompressed(folder: Path, scheme: Scheme, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    with ExitStack() as stack:
        opened = {
            name: file
            for path in _files(folder)
            for file in [stack.enter_context(safe_open(str(path), "pt"))]
            for name in file.keys()  # noqa: SIM118 - an open file is no mapping
        }
        for name, file in opened.items():
            if name.endswith(_SCALE):
                continue
            tensor: Tensor = file.get_tensor(name)
            scale = f"{name.removesuffix('.weight')}{_SCALE}"
            if scale in opened:
                tensor = dequantize(tensor, opened[scale].get_tensor(scale), scheme).to(dtype)
            yield name, tensor


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _names(path: Path) -> list[str]:
    with safe_open(str(path), "pt") as file:
        return list(file.keys())
