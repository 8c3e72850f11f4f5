"""Weights in eight bits as the compressed-tensors format stores them: writing and reading them.

A linear layer's weight W [N, K] becomes quantized data of the same shape and scales, all in one
symmetric rule (no zero points):

    scale = amax(part of W) / largest value       data = round(W / scale)        W ~ data * scale

``fp8`` and ``int8`` have one scale per output channel, ``fp8_block`` one per block of 128 x 128.
The inputs of such a layer are quantized while the model runs: per token, or per token and 128
channels. Names, dtypes and shapes in files are those of compressed-tensors' ``float-quantized`` and
``int-quantized`` (presets FP8_DYNAMIC, FP8_BLOCK and INT8_W8A8 of its ``quant_scheme.py``), which
vLLM and transformers read.

A checkpoint is decompressed weight by weight while it is read, so the model in memory is an
ordinary one: it can be trained, converted and saved, and compressed-tensors itself is not needed.
Programs that serve such weights multiply quantized inputs by quantized weights. Here
:func:`round_inputs` quantizes and dequantizes every input of such a layer, so that an evaluation
shows what both roundings cost, on any machine; only the order of summation is another.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

WeightFormat = Literal["fp8", "fp8_block", "int8"]
METHOD = "compressed-tensors"
BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights and inputs of a linear layer are stored and quantized."""

    name: WeightFormat
    dtype: torch.dtype
    """Of the codes."""
    max: float
    """The largest code."""
    block: int | None
    """Side of the blocks that share a scale; None for one scale per output channel."""

    @property
    def file_format(self) -> str:
        """``format`` in config.json."""
        return "float-quantized" if self.dtype.is_floating_point else "int-quantized"

    def why_not(self, in_features: int) -> str | None:
        """Why a layer with K inputs cannot be run in this scheme; None if it can."""
        if self.block is None or in_features % self.block == 0:
            return None
        return f"K = {in_features} is not a multiple of {self.block}, as groups of inputs are"

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """``quantization_config`` of config.json.

        Args:
            ignore: names of linear layers that stay as they are; ``re:`` begins a pattern.
        """
        common = {
            "num_bits": 8,
            "type": "float" if self.dtype.is_floating_point else "int",
            "symmetric": True,
        }
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
            "format": self.file_format,
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


def scheme_of(config: dict[str, Any], where: str) -> Scheme:
    """The scheme that a ``quantization_config`` names.

    Args:
        config: from config.json.
        where: the file, for the error.

    Raises:
        ValueError: it is none of those written here.
    """
    found = config.get("quant_method"), config.get("format")
    groups = list((config.get("config_groups") or {}).values())
    for scheme in SCHEMES.values():
        wanted = scheme.config([])["config_groups"]["group_0"]
        if (
            found == (METHOD, scheme.file_format)
            and len(groups) == 1
            and all(
                wanted[part].items() <= (groups[0].get(part) or {}).items()
                for part in ("weights", "input_activations")
            )
        ):
            return scheme
    raise ValueError(
        f"{where}: quantization_config (quant_method {found[0]!r}, format {found[1]!r}) is none of "
        f"those that coat-vlm export --weights writes ({', '.join(SCHEMES)}); export the folder "
        "again from weights that are not quantized"
    )


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight.

    A part of zeros has scale 1. Where all values of a part have one magnitude, they are the largest
    code, so they come back exactly in any dtype with fewer bits than FP32.

    Args:
        weight: [N, K], FP32, BF16 or FP16, finite.
        scheme: how.

    Returns:
        Codes [N, K] in the scheme's dtype, and scales in FP32: [N, 1], or
        [ceil(N / 128), ceil(K / 128)] of blocks, of which the last ones may be smaller.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    w = weight.float()
    if not torch.isfinite(w).all():
        raise ValueError(
            "the weight has NaN or infinite values, which no scale holds; export an earlier "
            "checkpoint"
        )
    if scheme.block is None:
        amax = w.abs().amax(1, keepdim=True)
    else:
        N, K = w.shape  # noqa: N806 - as in the formula
        padded = F.pad(w.abs(), (0, -K % scheme.block, 0, -N % scheme.block))
        amax = padded.unfold(0, scheme.block, scheme.block).unfold(1, scheme.block, scheme.block)
        amax = amax.amax((2, 3))
    scale = scale_of(amax, scheme)
    return codes_of(w, spread(scale, w.shape, scheme), scheme), scale


def scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """FP32 scales of parts with these largest magnitudes: never zero, never subnormal."""
    scale = (amax.float() / scheme.max).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, 1.0, scale)


def codes_of(x: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Codes of ``x``, rounded to nearest even; ``scale`` has its shape or broadcasts to it."""
    y = (x / scale).clamp(-scheme.max, scheme.max)
    return (y if scheme.dtype.is_floating_point else y.round()).to(scheme.dtype)


def spread(scale: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    """Scales of a weight in a form that broadcasts to its shape [N, K]."""
    if scheme.block is None:
        return scale
    rows, columns = (scale.repeat_interleave(scheme.block, 0), scheme.block)
    return rows.repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def dequantize(codes: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """What codes [N, K] stand for, in FP32."""
    return codes.float() * spread(scale.float(), codes.shape, scheme)


def sqnr_db(weight: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio of a whole weight in dB.

        10 log10(sum w^2 / sum (w - q(w))^2)

    Sums are in FP64; infinite where nothing is lost, a weight of zeros among that.
    """
    w = weight.double()
    noise = (w - approximation.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(w.square().sum().item() / noise)


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
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            names += file.keys()
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
            for path in sorted(folder.glob("*.safetensors"))
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


class RoundedInputLinear(nn.Linear):
    """A linear layer that quantizes its input: one scale per token, or per token and 128 channels.

    Its parameters are those of nn.Linear; :func:`round_inputs` makes it.
    """

    scheme: Scheme

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N] in the input's dtype."""
        return F.linear(rounded(input, self.scheme), self.weight, self.bias)


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """What the codes of inputs [..., K] stand for, in their dtype."""
    values, channels = x.float(), x.shape[-1]
    if scheme.block is not None:
        values = F.pad(values, (0, -channels % scheme.block)).unflatten(-1, (-1, scheme.block))
    scale = scale_of(values.abs().amax(-1, keepdim=True), scheme)
    back = codes_of(values, scale, scheme).float() * scale
    if scheme.block is not None:
        back = back.flatten(-2)[..., :channels]
    return back.to(x.dtype)


def round_inputs(model: nn.Module, scheme: Scheme, layers: Iterable[str]) -> None:
    """Let the named layers round their inputs, in place.

    Args:
        model: has a plain linear layer of each name.
        scheme: of their weights.
        layers: names of modules.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.__class__ = RoundedInputLinear
        layer.scheme = scheme
