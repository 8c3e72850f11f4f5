"""Compresses the linear layers of an exported folder's language model, tensor by tensor.

The layout's writer has put plain weights there; this replaces its safetensors files. At any time
one file's worth of compressed weights is in memory, and each plain file goes as soon as it is read.
Embeddings, output layer, norms, projector and vision tower stay as they are: together they are few,
and images pass through the last two.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.checkpoint.shards import SHARD_BYTES, save_tensors
from coat_vlm.export.transformers_parts import LANGUAGE, write_config
from coat_vlm.model import CoatVlm
from coat_vlm.model.compressed import SCHEMES, Scheme, dequantize, quantize, sqnr_db

RECORD = "quantization.json"
"""What compression did: per layer its name, shape, SQNR in dB (null where nothing is lost), and
bytes before and after; and the layers that stay as they are, with the reason."""
IGNORE = ["re:.*lm_head", "re:.*vision_tower.*", "re:.*projector.*"]
"""Linear layers that stay, by patterns that fit the layouts ``coat`` and ``llava``."""


def table(folder: Path) -> str:
    """The rows of a folder's quantization.json as lines of text, the worst layer below them."""
    record = read_json(folder / RECORD)
    rows = record["layers"]
    width = max(len(row["layer"]) for row in rows)
    lines = [f"{'layer':<{width}}  {'[N, K]':>16}  SQNR in dB ({record['weights']})"]
    for row in rows:
        lines.append(f"{row['layer']:<{width}}  {row['shape']!s:>16}  {_db(row)}")
    worst = min(rows, key=lambda row: float("inf") if row["sqnr_db"] is None else row["sqnr_db"])
    before, after = (sum(row[f"bytes_{when}"] for row in rows) for when in ("before", "after"))
    lines.append(
        f"lowest: {_db(worst).strip()} dB in {worst['layer']}; {len(rows)} layers, "
        f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB"
    )
    lines += [f"left as it is: {name}: {why}" for name, why in record["left"].items()]
    return "\n".join(lines)


def _db(row: dict[str, Any]) -> str:
    return "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}"


def compress_folder(folder: Path, model: CoatVlm, scheme: Scheme, prefix: str = LANGUAGE) -> None:
    """Compress the weights of a folder that is not in its place yet.

    Args:
        folder: has config.json and safetensors files of plain weights.
        model: says which weights are of linear layers; its own may be anywhere.
        scheme: how.
        prefix: of the language model's weights in the files.

    Raises:
        ValueError: a weight is not finite or not there, or no layer fits the scheme.
        OSError: something could not be written.
    """
    inputs = {f"{prefix}{name}": inputs for name, inputs in linear_layers(model)}
    why = {name: scheme.why_not(inputs[name]) for name in sorted(inputs, key=_natural)}
    left = {name: reason for name, reason in why.items() if reason}
    layers = inputs.keys() - left.keys()
    if not layers:
        first = next(iter(left.items()), ("", "the language model has no linear layer"))
        raise ValueError(
            f"--weights {scheme.name}: no layer fits ({': '.join(first)}); allowed here: "
            f"{', '.join(name for name, other in SCHEMES.items() if other.block is None)}"
        )
    writer = _Writer(folder)
    rows: list[dict[str, Any]] = []
    sources = sorted(folder.glob("*.safetensors"))
    bar = tqdm(total=len(layers), desc=scheme.name, unit="layer", delay=2.0, leave=False)
    with bar:
        for source in sources:
            for name, weight in _tensors(source):
                layer = name.removesuffix(".weight")
                if layer not in layers:
                    writer.add(name, weight)
                    continue
                try:
                    codes, scale = quantize(weight, scheme)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                ratio = sqnr_db(weight, dequantize(codes, scale, scheme))
                rows.append(
                    {
                        "layer": layer,
                        "shape": list(weight.shape),
                        "sqnr_db": round(ratio, 3) if ratio != float("inf") else None,
                        "bytes_before": weight.nbytes,
                        "bytes_after": codes.nbytes + scale.nbytes,
                    }
                )
                writer.add(name, codes)
                writer.add(f"{name}_scale", scale)
                bar.update()
            source.unlink()
    writer.close()
    absent = layers - {row["layer"] for row in rows}
    if absent:
        raise ValueError(
            f"{folder} has no weights of {min(absent)} ({len(absent)} of {len(layers)} layers are "
            "not there); export it once more without --weights and look at the names"
        )
    record = {
        "weights": scheme.name,
        "formula": "sqnr_db = 10 log10(sum w^2 / sum (w - q(w))^2); null: nothing is lost",
        "layers": sorted(rows, key=lambda row: _natural(row["layer"])),
        "left": left,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    config = read_json(folder / "config.json")
    # Other programs have other prefixes before a layer's name.
    ends = (name.removeprefix(prefix).removeprefix("model.") for name in left)
    config["quantization_config"] = scheme.config(
        [*IGNORE, *(f"re:.*{re.escape(end)}$" for end in ends)]
    )
    write_config(folder / "config.json", config)


def linear_layers(model: CoatVlm) -> Iterator[tuple[str, int]]:
    """Name and inputs of the language model's linear layers but its output layer."""
    language: Any = model.language_model
    output = language.get_output_embeddings()
    for name, module in language.named_modules():
        if isinstance(module, nn.Linear) and module is not output:
            yield name, module.in_features


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(str(path), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - an open file is no mapping
            yield name, file.get_tensor(name)


class _Writer:
    """Writes safetensors files of bounded size and their index, as transformers does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        if sum(tensor.nbytes for tensor in self._pending.values()) >= SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """Give the files the names that say how many they are."""
        if self._pending:
            self._flush()
        number = len(self._files)
        (self._folder / "model.safetensors.index.json").unlink(missing_ok=True)
        if number == 1:
            self._temporary(0).rename(self._folder / "model.safetensors")
            return
        placed: dict[str, str] = {}
        for at, names in enumerate(self._files):
            target = f"model-{at + 1:05d}-of-{number:05d}.safetensors"
            self._temporary(at).rename(self._folder / target)
            placed |= dict.fromkeys(names, target)
        index = {
            "metadata": {"total_size": self._bytes},
            "weight_map": dict(sorted(placed.items())),
        }
        write_config(self._folder / "model.safetensors.index.json", index)

    def _temporary(self, at: int) -> Path:
        return self._folder / f"compressed-{at:05d}.tmp"

    def _flush(self) -> None:
        path = self._temporary(len(self._files))
        save_tensors(self._pending, path, {"format": "pt"})
        self._files.append(list(self._pending))
        self._pending = {}
