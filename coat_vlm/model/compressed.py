"""Writes and reads 8-bit weights of a language model in the compressed-tensors format of vLLM.

    scale = amax(part of W) / largest value       data = round(W / scale)        W ~ data * scale

The schemes are the presets FP8_DYNAMIC, FP8_BLOCK and INT8_W8A8 of its ``quant_scheme.py``. Weights
are decompressed when they are read. In addition, servers quantize the inputs of these layers, which
:func:`round_inputs` imitates.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

WeightFormat = Literal["fp8", "fp8_block", "int8"]
METHOD = "compressed-tensors"
BLOCK = 128
RECORD = "quantization.json"
"""File with SQNR and bytes of each compressed layer, and why others are uncompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Quantization of a linear layer's weights and inputs."""

    name: WeightFormat
    dtype: torch.dtype
    max: float
    """Maximum of the quantized data."""
    block: int | None
    """Side of the blocks with one scale each; None for one scale per output channel."""

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """Create config.json's ``quantization_config``; ``ignore``: names, or ``re:`` patterns."""
        kind = "float" if self.dtype.is_floating_point else "int"
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        weights = {**common, "dynamic": False, "strategy": "channel"}
        inputs = {**common, "dynamic": True, "strategy": "token"}
        if self.block is not None:
            weights |= {"strategy": "block", "block_structure": [self.block, self.block]}
            inputs |= {"strategy": "group", "group_size": self.block}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": METHOD,
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
SCHEMES: dict[WeightFormat, Scheme] = {
    "fp8": Scheme(name="fp8", dtype=torch.float8_e4m3fn, max=_E4M3_MAX, block=None),
    "fp8_block": Scheme(name="fp8_block", dtype=torch.float8_e4m3fn, max=_E4M3_MAX, block=BLOCK),
    "int8": Scheme(name="int8", dtype=torch.int8, max=127.0, block=None),
}


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K]; ValueError if a value is NaN or infinite.

    Returns data [N, K], and FP32 scales [N, 1], or [ceil(N / 128), ceil(K / 128)] for blocks, of
    which the last may be smaller.
    """
    w = weight.float()
    if not torch.isfinite(w).all():
        raise ValueError(
            "the weight has NaN or infinite values and cannot be quantized; export an earlier "
            "checkpoint"
        )
    if scheme.block is None:
        amax = w.abs().amax(1, keepdim=True)
    else:
        amax = F.max_pool2d(w.abs()[None], scheme.block, ceil_mode=True)[0]
    scale = compute_scale(amax, scheme)
    return quantize_with(w, expand_scale(scale, w.shape, scheme), scheme), scale


def compute_scale(amax: Tensor, scheme: Scheme) -> Tensor:
    """Compute FP32 scales, never zero or subnormal, from largest magnitudes."""
    scale = (amax.float() / scheme.max).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, 1.0, scale)


def quantize_with(x: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Quantize ``x``, with round to nearest even; ``scale`` broadcasts to its shape."""
    y = (x / scale).clamp(-scheme.max, scheme.max)
    return (y if scheme.dtype.is_floating_point else y.round()).to(scheme.dtype)


def expand_scale(scale: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    """Expand a weight's scales so that they broadcast to its shape [N, K]."""
    if scheme.block is None:
        return scale
    rows = scale.repeat_interleave(scheme.block, 0)
    return rows.repeat_interleave(scheme.block, 1)[: shape[0], : shape[1]]


def dequantize(data: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Dequantize data [N, K] to FP32."""
    return data.float() * expand_scale(scale.float(), data.shape, scheme)


def sqnr_db(weight: Tensor, approximation: Tensor) -> float:
    """Compute 10 log10(sum w^2 / sum (w - q(w))^2) in FP64; infinite if quantization is exact."""
    w = weight.double()
    noise = (w - approximation.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(w.square().sum().item() / noise)


def compress(
    state: dict[str, Tensor], model: PreTrainedModel, scheme: Scheme, written: str | None = None
) -> dict[str, Any]:
    """Replace the weights of the language model's linear layers by data and scales, in place.

    Names in the folder start with ``written``, by default as in ``state``. Returns the content of
    :data:`RECORD`; ValueError if no layer fits the scheme.
    """
    language: Any = cast(Any, model).language
    prefix = next(f"{name}." for name, module in model.named_modules() if module is language)
    written = prefix if written is None else written
    experts = [name for name, p in language.named_parameters() if p.ndim > 2 and p.shape[1] > 1]
    if experts:
        raise ValueError(
            f"--weights {scheme.name}: {experts[0]} has the weights of several experts, which are "
            "not compressed; export without --weights"
        )
    output = language.get_output_embeddings()
    layers = {
        name: module.in_features
        for name, module in language.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    left = {
        written + name: f"K = {layers[name]} is not a multiple of {scheme.block}, the group "
        "size of the inputs"
        for name in sorted(layers, key=_natural_key)
        if scheme.block is not None and layers[name] % scheme.block
    }
    if len(left) == len(layers):
        first = next(iter(left.items()), ("", "the language model has no linear layer"))
        raise ValueError(
            f"--weights {scheme.name}: no layer is supported ({': '.join(first)}); allowed here: "
            f"{', '.join(name for name, other in SCHEMES.items() if other.block is None)}"
        )
    rows: list[dict[str, Any]] = []
    chosen = [name for name in sorted(layers, key=_natural_key) if written + name not in left]
    for layer in tqdm(chosen, desc=scheme.name, unit="layer", delay=2.0, leave=False):
        name = f"{prefix}{layer}.weight"
        weight = state[name]
        try:
            data, scale = quantize(weight, scheme)
        except ValueError as error:
            raise ValueError(f"{written}{layer}.weight: {error}") from None
        ratio = sqnr_db(weight, dequantize(data, scale, scheme))
        rows.append(
            {
                "layer": written + layer,
                "shape": list(weight.shape),
                "sqnr_db": round(ratio, 3) if ratio != math.inf else None,
                "bytes_before": weight.nbytes,
                "bytes_after": data.nbytes + scale.nbytes,
            }
        )
        state |= {name: data, f"{name}_scale": scale}
    return {
        "weights": scheme.name,
        "formula": "sqnr_db = 10 log10(sum w^2 / sum (w - q(w))^2); null: exact",
        "layers": rows,
        "left": left,
    }


def _natural_key(name: str) -> list[tuple[int, str]]:
    # Layer 2 comes before layer 10.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def describe_compression(folder: Path, record: dict[str, Any], model: PreTrainedModel) -> None:
    """Write quantization.json, and ``quantization_config`` in config.json."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    names = cast(Any, model).part_names
    # Other programs use other prefixes of layer names.
    others = (name.removeprefix("model.") for name in (*names["vision"], *names["projector"]))
    parts = (f"re:.*{re.escape(name)}.*" for name in others)
    ends = (re.sub(r"^.*?(?=layers\.)", "", name) for name in record["left"])
    ignore = ["re:.*lm_head", *parts, *(f"re:.*{re.escape(end)}$" for end in ends)]
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = SCHEMES[record["weights"]].config(ignore)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def table(folder: Path) -> str:
    """Format a folder's quantization.json as text; the worst layer comes last."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
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
    lines += [f"not compressed: {name}: {why}" for name, why in record["left"].items()]
    return "\n".join(lines)


def _db(row: dict[str, Any]) -> str:
    return "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}"


_SCALE = ".weight_scale"


def read_compression(folder: str | Path) -> Scheme | None:
    """Return a folder's scheme, None without one; ValueError if it is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    except json.JSONDecodeError:
        return None  # reading the configuration raises the error
    if config is None:
        return None
    for scheme in SCHEMES.values():
        if config == scheme.config(config.get("ignore", [])):
            return scheme
    method, kind = config.get("quant_method"), config.get("format")
    raise ValueError(
        f"{path}: quantization_config (quant_method {method!r}, format {kind!r}) is not among "
        f"the schemes of coat-vlm export --weights ({', '.join(SCHEMES)}); export the folder "
        "again from weights that are not quantized"
    )


def make_load_arguments(
    folder: Path, scheme: Scheme, config: Any, dtype: torch.dtype | str | None
) -> dict[str, Any]:
    """Decompress the weights of a folder, and return them as arguments of ``from_pretrained``.

    ``quantization_config`` is removed from ``config``. ``auto`` is the uncompressed weights' dtype.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    chosen = dtype if isinstance(dtype, torch.dtype) else config.dtype
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    for scale in [name for name in state if name.endswith(_SCALE)]:
        name = scale.removesuffix("_scale")
        state[name] = dequantize(state[name], state.pop(scale), scheme).to(chosen)
    arguments: dict[str, Any] = {"config": config, "dtype": chosen, "state_dict": state}
    if (folder / "generation_config.json").is_file():
        arguments["generation_config"] = GenerationConfig.from_pretrained(folder)
    return arguments


class RoundedInputLinear(nn.Linear):
    """An nn.Linear that rounds its input, with scales per token, or per token and block."""

    scheme: Scheme

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype."""
        x = input.float().unflatten(-1, (-1, self.scheme.block or input.shape[-1]))
        scale = compute_scale(x.abs().amax(-1, keepdim=True), self.scheme)
        rounded = quantize_with(x, scale, self.scheme).float() * scale
        return F.linear(rounded.flatten(-2).to(input.dtype), self.weight, self.bias)


def round_inputs(model: nn.Module, scheme: Scheme, folder: Path) -> None:
    """Make the layers with compressed weights round their inputs, in place."""
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            names += file.keys()
    # In a published layout, names may have other prefixes than the modules.
    layers = tuple(name.removesuffix(_SCALE) for name in names if name.endswith(_SCALE))
    for name, module in cast(Any, model).language.named_modules():
        if isinstance(module, nn.Linear) and any(one.endswith(f".{name}") for one in layers):
            layer: Any = module
            layer.__class__ = RoundedInputLinear
            layer.scheme = scheme
