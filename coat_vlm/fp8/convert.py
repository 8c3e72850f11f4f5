"""What ``precision`` means: dtype of weights, and which layers become FP8 (families: blocks.py).

    report = convert(model, Fp8Config())
    print(report)

:func:`convert` replaces the class of a block by a subclass with another forward pass, in place, so
``state_dict``, ``save_pretrained``, ``generate`` and gradient checkpointing are those of the
original model. :func:`back_to_bf16` undoes it for a block.

:class:`Arithmetic` is a precision on a device. On a GPU, all precisions but ``fp32`` keep weights
in BF16 (DeepSpeed holds FP32 master weights). Most CPUs have no BF16 arithmetic, and emulating it
for every operation makes training ten times as slow. There all keep FP32 weights and put the
roundings where the precision shows: ``bf16`` rounds the operands and the result of every linear
layer to BF16, with the sum in FP32; the FP8 precisions run the reference arithmetic of the FP8
blocks and round the other linear layers as ``bf16`` does. (The forward GEMMs of the first blocks,
BF16 on a GPU, are FP32 there: ``fp8.bf16_forward_first``.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coat_kernels import GEMM_MULTIPLE, use_reference
from coat_kernels.formats import check_group
from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8.blocks import FP8_LAYERS, Fp8DecoderLayer, Fp8EncoderLayer
from coat_vlm.fp8.linear import Fp8Linear
from coat_vlm.fp8.weights import WeightReuse
from coat_vlm.model.lora import base_layer, has_adapters

Part = Literal["vision", "language"]

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada; Hopper has 9.0)."""


@dataclass(slots=True)
class ConversionReport:
    """What :func:`convert` did."""

    converted: dict[str, str] = field(default_factory=dict)
    """Module name -> what it is now."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name -> why it stays."""

    def __str__(self) -> str:
        lines = [f"FP8: {len(self.converted)} modules converted, {len(self.skipped)} left"]
        lines += _summed(self.converted, "")
        lines += _summed(self.skipped, "left, ")
        return "\n".join(lines)


def _summed(entries: dict[str, str], prefix: str) -> list[str]:
    """One line per run of numbered modules with the same text: ``layers.0-7``."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, text in entries.items():
        number = re.search(r"(?<=\.)\d+(?=\.|$)", name)
        pattern = name if number is None else f"{name[: number.start()]}{{}}{name[number.end() :]}"
        runs.setdefault((pattern, text), []).append(number[0] if number else "")
    return [
        f"  {pattern.format('-'.join(dict.fromkeys((run[0], run[-1]))))}: {prefix}{text}"
        for (pattern, text), run in runs.items()
    ]


def convert(model: nn.Module, config: Fp8Config) -> ConversionReport:
    """Convert the blocks that ``config`` selects.

    Args:
        model: a CoatVlm, or any transformers model with blocks of a known family: Llama, Mistral,
            Qwen2/2.5, Qwen3 decoders, SigLIP and CLIP encoders.
        config: which parts in which precision (``coat`` where it says nothing), which layers,
            which group size.

    Returns:
        What was converted, what was skipped and why.

    Raises:
        ValueError: a selected part has no block of a known family, a shape does not fit an FP8
            GEMM, or the group size does not divide. The model is unchanged then.
    """
    config = config.resolved("coat")
    report = ConversionReport()
    blocks: dict[Part, list[tuple[str, nn.Module]]] = {"vision": [], "language": []}
    for name, module in model.named_modules():
        kind = FP8_LAYERS.get(type(module).__name__)
        if kind is not None:
            blocks["vision" if kind is Fp8EncoderLayer else "language"].append((name, module))
    chosen: dict[Part, list[tuple[Any, str, bool]]]
    chosen = {part: list(_choose(part, of, config, report)) for part, of in blocks.items()}
    linears: list[Any] = list(_choose_linears(model, config, report))
    _check_found(model, config, blocks, chosen)
    for block, precision, bf16_forward in chosen["vision"] + chosen["language"]:
        layers: list[Any] = list(_linears_of(block).values())
        if precision == "fp8_linear":
            linears += layers
            continue
        lean = precision == "coat_lean"
        for layer in layers:
            layer.fp8_gradients = config.gradients or ("e4m3" if lean else "e5m2")
            layer.fp8_bf16_forward = bf16_forward
        block.__class__ = _fp8_class(type(block))
        block.fp8_group_size = config.group_size
        block.fp8_lean = lean and not bf16_forward  # lean attention works on rounded heads
    for layer in linears:
        layer.__class__ = Fp8Linear
        layer.fp8_gradients = config.gradients or "e5m2"
        layer.fp8_bf16_forward = False
        layer.fp8_key = object()  # shared by shallow copies (the loss makes them), not by deep ones
    return report


def _choose(
    part: Part, blocks: Sequence[tuple[str, Any]], config: Fp8Config, report: ConversionReport
) -> Iterator[tuple[Any, str, bool]]:
    """Blocks to convert, the precision of each, and whether its forward GEMMs are BF16."""
    wanted: str = getattr(config, part)
    bf16_first = config.bf16_forward_first
    if bf16_first is None:
        bf16_first = min(len(blocks) // 6, 2)
    for number, (name, block) in enumerate(blocks):
        why = _left(config, part, number, len(blocks))
        if why is not None:
            report.skipped[name] = why
            continue
        precision, bf16_forward = wanted, number < bf16_first
        if has_adapters(block):
            precision = "fp8_linear"
            instead = f", not {wanted}: adapters read BF16 inputs" if wanted != precision else ""
            text = f"frozen linear layers in FP8, LoRA adapters in BF16{instead}"
        elif wanted == "fp8_linear":
            text = "linear layers in FP8"
        else:
            text = f"FP8 {'encoder' if part == 'vision' else 'decoder'} block"
            if bf16_forward:
                text += ", forward products in BF16"
            elif wanted == "coat_lean":
                text += ", lean"
        _check_block(name, block, None if precision == "fp8_linear" else config)
        report.converted[name] = text
        yield block, precision, bf16_forward


def _linears_of(block: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a block by name; of those with LoRA adapters the frozen layer."""
    names = FP8_LAYERS[type(block).__name__].LINEARS
    return {name: base_layer(block.get_submodule(name)) for name in names}


def _left(config: Fp8Config, part: Part, number: int, total: int) -> str | None:
    """Why block ``number`` of ``total`` stays as it is; None if it does not."""
    if getattr(config, part) == "bf16":
        return f"fp8.{part} is bf16"
    if number < config.skip_first:
        return f"among the first {config.skip_first} (fp8.skip_first)"
    if number >= total - config.skip_last:
        return f"among the last {config.skip_last} (fp8.skip_last)"
    return None


def _choose_linears(
    model: nn.Module, config: Fp8Config, report: ConversionReport
) -> Iterator[nn.Linear]:
    """Single linear layers to convert: the projector's and the output layer."""
    for name, module in model.named_modules():
        *holders, last = name.split(".")
        if type(module) is not nn.Linear or ("projector" not in holders and last != "lm_head"):
            continue
        key = "projector" if "projector" in holders else "lm_head"
        if getattr(config, key) == "bf16":
            report.skipped[name] = f"fp8.{key} is bf16"
            continue
        _check_linear(name, module)
        report.converted[name] = "FP8 linear"
        yield module


def _check_found(
    model: nn.Module,
    config: Fp8Config,
    found: dict[Part, list[tuple[str, nn.Module]]],
    chosen: Mapping[Part, Sequence[Any]],
) -> None:
    """Complain where the policy selects a part that has nothing to convert."""
    attributes = {"vision": "vision_tower", "language": "language_model"}
    composed = all(hasattr(model, name) for name in attributes.values())
    known = f"block that FP8 knows; it knows {', '.join(FP8_LAYERS)}"
    for part, blocks in found.items():
        # A composed model has None where it was built without a tower.
        expected = composed and getattr(model, attributes[part]) is not None
        if chosen[part] or getattr(config, part) == "bf16" or not (expected or blocks):
            continue
        if blocks:
            raise ValueError(
                f"fp8.skip_first={config.skip_first} and fp8.skip_last={config.skip_last} leave no "
                f"{part} block to convert; lower them, or set fp8.{part}: bf16"
            )
        raise ValueError(
            f"the {part} model has no {known}: set fp8.{part}: bf16, or use precision bf16"
        )
    if not any(found.values()):
        raise ValueError(f"{type(model).__name__} has no {known}")


def _check_block(name: str, block: nn.Module, config: Fp8Config | None) -> None:
    """Refuse shapes and activations without a kernel.

    Without a configuration only the linear layers are looked at: they alone become FP8.
    """
    for child, layer in _linears_of(block).items():
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{name}.{child} is a {type(layer).__name__}; an FP8 block reads the weights of "
                "plain nn.Linear layers itself and would pass this one by: convert before wrapping "
                "layers in anything but peft's LoRA, or leave this part out"
            )
        _check_linear(f"{name}.{child}", layer)
        if config is not None:
            check_group(f"{name}.{child}", layer.in_features, config.group_size)
    attention: Any = block.self_attn
    activation = attention.config.hidden_act
    allowed = FP8_LAYERS[type(block).__name__].ACTIVATIONS
    if config is not None and activation not in allowed:
        raise ValueError(
            f"{name}: hidden_act {activation!r} has no FP8 kernel; allowed here: "
            f"{', '.join(allowed)}: leave this part out (fp8.vision or fp8.language: bf16), or "
            "use fp8_linear"
        )


def _check_linear(name: str, layer: nn.Linear) -> None:
    K, N = layer.in_features, layer.out_features
    if K % GEMM_MULTIPLE or N % GEMM_MULTIPLE:
        raise ValueError(
            f"{name}: weight [N, K] = [{N}, {K}]; FP8 GEMMs take multiples of {GEMM_MULTIPLE}: "
            "change the layer's width, or leave this part in BF16 (fp8.vision, fp8.language, "
            "fp8.projector or fp8.lm_head: bf16)"
        )


@cache
def _fp8_class(original: type[nn.Module]) -> type[nn.Module]:
    """The FP8 subclass; made once, so that equal layers have equal classes."""
    bases = (FP8_LAYERS[original.__name__], original)
    return type(f"Fp8{original.__name__}", bases, {"__module__": original.__module__})


def original_class(block: nn.Module) -> type[nn.Module]:
    """The class a converted block had before."""
    return type(block).__mro__[2]  # after the FP8 class come the FP8 forward pass and the original


def fp8_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The converted blocks of a model, by name."""
    kinds: Any = (Fp8DecoderLayer, Fp8EncoderLayer)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def back_to_bf16(block: nn.Module, round_linears: bool) -> None:
    """Undo a block's conversion in place, as if ``fp8.skip_first`` had left it.

    Args:
        block: a block that :func:`convert` converted.
        round_linears: on a CPU, compute BF16 by rounding (:class:`Arithmetic`).
    """
    modules: list[Any] = list(block.modules())
    if isinstance(block, Fp8DecoderLayer | Fp8EncoderLayer):
        modules[0].__class__ = original_class(block)
    for layer in modules:
        if type(layer) in (nn.Linear, Fp8Linear):
            layer.__class__ = Bf16RoundedLinear if round_linears else nn.Linear


class Bf16RoundedLinear(nn.Linear):
    """A linear layer that rounds its operands and its result to BF16, and so their gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N], in the input's dtype."""
        return _rounded(F.linear(_rounded(input), _rounded(self.weight), self.bias))


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a model computes."""

    dtype: torch.dtype
    """Dtype of the weights."""
    fp8: Fp8Config | None = None
    """What becomes FP8."""
    round_linears: bool = False
    """Round the operands of the remaining linear layers to BF16 (on a CPU)."""

    @property
    def bf16_weights(self) -> bool:
        """Whether DeepSpeed keeps FP32 master weights of BF16 weights."""
        return self.dtype == torch.bfloat16

    def apply(self, model: nn.Module) -> ConversionReport | None:
        """Convert the model's layers in place; what became FP8, or None without FP8.

        Raises:
            ValueError: see :func:`convert`.
        """
        report = None if self.fp8 is None else convert(model, self.fp8)
        use_reference(self.fp8 is not None and self.fp8.reference)
        if self.round_linears:
            inside = {id(m) for _, block in fp8_blocks(model) for m in block.modules()}
            for module in model.modules():
                if type(module) is nn.Linear and id(module) not in inside:
                    module.__class__ = Bf16RoundedLinear
        return report

    def weight_reuse(self, model: nn.Module, device: torch.device) -> WeightReuse:
        """How micro-batches share the FP8 weights of ``model``, converted by :meth:`apply`."""
        graphs = self.fp8 is not None and self.fp8.cuda_graphs  # they quantize in every pass
        policy = "recompute" if self.fp8 is None or graphs else self.fp8.weights
        linears = {id(m): m for m in model.modules() if isinstance(m, Fp8Linear)}
        for _, block in fp8_blocks(model):
            linears |= {id(m): m for m in block.modules() if isinstance(m, nn.Linear)}
        # Row-major and transposed; under ZeRO-3 a rank holds a part of a weight.
        sizes = (getattr(m.weight, "ds_numel", m.weight.numel()) for m in linears.values())
        return WeightReuse(policy, 2 * sum(sizes), device)


def arithmetic_of(precision: Precision, fp8: Fp8Config | None, device: torch.device) -> Arithmetic:
    """The arithmetic of a recipe on a device.

    Args:
        precision: the recipe's.
        fp8: the recipe's; its defaults when absent.
        device: where the model will run.

    Raises:
        ValueError: the GPU has no FP8 tensor cores and ``fp8.reference`` is not set.
    """
    if precision == "fp32":
        return Arithmetic(torch.float32)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if precision == "bf16":
        return Arithmetic(dtype, round_linears=not on_gpu)
    settings = (fp8 or Fp8Config()).resolved(precision)
    if on_gpu and not settings.reference:
        check_capability(torch.cuda.get_device_capability(device))
    return Arithmetic(dtype, settings, round_linears=not on_gpu)


def check_capability(capability: tuple[int, int]) -> None:
    """Refuse a GPU without FP8 tensor cores.

    Raises:
        ValueError: it says what to do instead.
    """
    if capability < FP8_CAPABILITY:
        needed, found = ("{}.{}".format(*version) for version in (FP8_CAPABILITY, capability))
        raise ValueError(
            f"an FP8 precision needs FP8 tensor cores, compute capability {needed} or newer (Ada, "
            f"Hopper); this GPU has {found}: train with precision=bf16, or set fp8.reference=true "
            "for the plain PyTorch arithmetic, which is slow"
        )
