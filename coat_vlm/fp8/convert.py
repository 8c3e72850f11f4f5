"""Turns a model's blocks into FP8 blocks, in place: parameters, names and checkpoints stay.

    report = convert(model, Fp8Config())
    print(report)

A block's class is replaced by a subclass with another forward pass, so ``state_dict``,
``save_pretrained``, ``generate`` and gradient checkpointing are those of the original model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from coat_kernels import GEMM_MULTIPLE
from coat_kernels.formats import check_group
from coat_vlm.config import BlockPrecision, Fp8Config
from coat_vlm.fp8 import decoder_block, encoder_block
from coat_vlm.fp8.decoder_block import Fp8DecoderLayer
from coat_vlm.fp8.encoder_block import GELUS, Fp8EncoderLayer
from coat_vlm.fp8.linear import Fp8Linear
from coat_vlm.model.lora import base_layer, has_adapters

Part = Literal["vision", "projector", "language"]

_FP8_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Original class -> its FP8 subclass; made once, so that equal layers have equal classes."""


@dataclass(slots=True)
class ConversionReport:
    """What :func:`convert` did."""

    converted: dict[str, str] = field(default_factory=dict)
    """Module name -> what it is now."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name -> why it stays."""

    def __str__(self) -> str:
        lines = [f"FP8: {len(self.converted)} modules converted, {len(self.skipped)} left"]
        lines += [f"  {name}: {what}" for name, what in _summed(self.converted)]
        lines += [f"  {name}: left, {why}" for name, why in _summed(self.skipped)]
        return "\n".join(lines)


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
    linears: list[nn.Module] = []
    whole: list[tuple[nn.Module, bool, bool]] = []
    seen: set[Part] = set()
    blocks = list(_blocks(model))
    for part in ("vision", "language"):
        precision = getattr(config, part)
        of_part = [(name, module) for name, kind, module in blocks if kind == part]
        for number, (name, module) in enumerate(of_part):
            why = _left(config, part, number, len(of_part))
            if why is not None:
                report.skipped[name] = why
                continue
            seen.add(part)
            adapted = has_adapters(module)
            alone = adapted or precision == "fp8_linear"
            what = _check_block(name, module, None if alone else config)
            if alone:
                linears += _linears_of(module).values()
                report.converted[name] = _linears_alone(precision, adapted)
            else:
                lean = precision == "coat_lean"
                bf16_forward = number < _bf16_forward_blocks(config, len(of_part))
                whole.append((module, lean, bf16_forward))
                report.converted[name] = what + (
                    ", forward products in BF16" if bf16_forward else ", lean" if lean else ""
                )
    for name, module in _linears(model, config, report):
        _check_linear(name, module)
        linears.append(module)
        report.converted[name] = "FP8 linear"
    _check_found(model, config, seen, blocks)
    for module in linears:
        module.__class__ = Fp8Linear
        setattr(module, "fp8_gradients", config.gradients or "e5m2")  # noqa: B010 - a new attribute
        setattr(module, "fp8_bf16_forward", False)  # noqa: B010 - likewise
        # Shared by shallow copies (the loss makes them), not by deep ones.
        setattr(module, "fp8_key", object())  # noqa: B010 - a new attribute
    for module, lean, bf16_forward in whole:
        layer: Any
        for layer in _linears_of(module).values():
            layer.fp8_gradients = config.gradients or ("e4m3" if lean else "e5m2")
            layer.fp8_bf16_forward = bf16_forward
        module.__class__ = _fp8_class(type(module))
        block: Any = module
        block.fp8_group_size = config.group_size
        # Lean attention works on rounded heads.
        block.fp8_lean = lean and not bf16_forward
    return report


def _linears_of(block: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a block by name; of those with LoRA adapters the frozen layer."""
    encoder = type(block).__name__ in encoder_block.SUPPORTED
    names = encoder_block.LINEARS if encoder else decoder_block.LINEARS
    return {name: base_layer(block.get_submodule(name)) for name in names}


def _linears_alone(precision: BlockPrecision, adapted: bool) -> str:
    """What a block is of which only the linear layers become FP8."""
    if not adapted:
        return "linear layers in FP8"
    instead = "" if precision == "fp8_linear" else f", not {precision}: adapters read BF16 inputs"
    return f"frozen linear layers in FP8, LoRA adapters in BF16{instead}"


def fp8_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The converted blocks of a model, by name."""
    kinds = tuple(_FP8_CLASSES.values())
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def fp8_weight_bytes(model: nn.Module) -> int:
    """Bytes of FP8 copies of all weights that FP8 GEMMs read, row-major and transposed."""
    linears = {id(m): m for m in model.modules() if isinstance(m, Fp8Linear)}
    for _, block in fp8_blocks(model):
        children = (m for m in block.modules() if isinstance(m, nn.Linear))
        linears |= {id(m): m for m in children}
    # Under ZeRO-3 a rank holds a part of a weight.
    return 2 * sum(getattr(m.weight, "ds_numel", m.weight.numel()) for m in linears.values())


def original_class(block: nn.Module) -> type[nn.Module]:
    """The class a converted block had before."""
    return type(block).__mro__[2]  # after the FP8 class come the FP8 forward pass and the original


def _blocks(model: nn.Module) -> Iterator[tuple[str, Part, nn.Module]]:
    """Blocks of a known family, in order."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in decoder_block.SUPPORTED:
            yield name, "language", module
        elif kind in encoder_block.SUPPORTED:
            yield name, "vision", module


def _left(config: Fp8Config, part: Part, number: int, total: int) -> str | None:
    """Why block ``number`` of ``total`` stays as it is; None if it does not."""
    if getattr(config, part) == "bf16":
        return f"fp8.{part} is bf16"
    if number < config.skip_first:
        return f"among the first {config.skip_first} (fp8.skip_first)"
    if number >= total - config.skip_last:
        return f"among the last {config.skip_last} (fp8.skip_last)"
    return None


def _bf16_forward_blocks(config: Fp8Config, total: int) -> int:
    """How many of ``total`` blocks, from the first, have forward products in BF16."""
    wanted = config.bf16_forward_first
    return min(total // 6, 2) if wanted is None else wanted


def _linears(
    model: nn.Module, config: Fp8Config, report: ConversionReport
) -> Iterator[tuple[str, nn.Linear]]:
    """Single linear layers that the policy selects: the projector's and the output layer."""
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        last = name.rpartition(".")[2]
        if name.startswith("projector.") or ".projector." in name:
            selected, key = config.projector, "projector"
        elif last == "lm_head":
            selected, key = config.lm_head, "lm_head"
        else:
            continue
        if selected != "bf16":
            yield name, module
        else:
            report.skipped[name] = f"fp8.{key} is bf16"


def _check_found(
    model: nn.Module, config: Fp8Config, seen: set[Part], blocks: list[tuple[str, Part, nn.Module]]
) -> None:
    """Complain where the policy selects a part that has nothing to convert."""
    parts = {"vision": "vision_tower", "language": "language_model"}
    composed = all(hasattr(model, name) for name in parts.values())
    for part, attribute in parts.items():
        present = any(kind == part for _, kind, _ in blocks)
        # A composed model has None where it was built without a tower.
        expected = composed and getattr(model, attribute) is not None
        if part in seen or getattr(config, part) == "bf16" or not (expected or present):
            continue
        if present:
            raise ValueError(
                f"fp8.skip_first={config.skip_first} and fp8.skip_last={config.skip_last} leave no "
                f"{part} block to convert; lower them, or set fp8.{part}: bf16"
            )
        raise ValueError(
            f"the {part} model has no block that FP8 knows; it knows "
            f"{', '.join((*decoder_block.SUPPORTED, *encoder_block.SUPPORTED))}: set "
            f"fp8.{part}: bf16, or use precision bf16"
        )
    if not seen and not blocks:
        raise ValueError(
            f"{type(model).__name__} has no block that FP8 knows; it knows "
            f"{', '.join((*decoder_block.SUPPORTED, *encoder_block.SUPPORTED))}"
        )


def _check_block(name: str, module: nn.Module, config: Fp8Config | None) -> str:
    """Refuse shapes and activations without a kernel; says what the block becomes.

    Without a configuration only the linear layers are looked at: they alone become FP8.
    """
    encoder = type(module).__name__ in encoder_block.SUPPORTED
    for child, layer in _linears_of(module).items():
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{name}.{child} is a {type(layer).__name__}; an FP8 block reads the weights of "
                "plain nn.Linear layers itself and would pass this one by: convert before wrapping "
                "layers in anything but peft's LoRA, or leave this part out"
            )
        _check_linear(f"{name}.{child}", layer)
        if config is not None:
            check_group(f"{name}.{child}", layer.in_features, config.group_size)
    attention: Any = module.self_attn
    activation = attention.config.hidden_act
    allowed = tuple(GELUS) if encoder else ("silu", "swish")
    if config is not None and activation not in allowed:
        raise ValueError(
            f"{name}: hidden_act {activation!r} has no FP8 kernel; allowed here: "
            f"{', '.join(allowed)}: leave this part out (fp8.vision or fp8.language: bf16), or "
            "use fp8_linear"
        )
    return "FP8 encoder block" if encoder else "FP8 decoder block"


def _check_linear(name: str, layer: nn.Linear) -> None:
    K, N = layer.in_features, layer.out_features
    if K % GEMM_MULTIPLE or N % GEMM_MULTIPLE:
        raise ValueError(
            f"{name}: weight [N, K] = [{N}, {K}]; FP8 GEMMs take multiples of {GEMM_MULTIPLE}: "
            "change the layer's width, or leave this part in BF16 (fp8.vision, fp8.language, "
            "fp8.projector or fp8.lm_head: bf16)"
        )


def _fp8_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _FP8_CLASSES:
        encoder = original.__name__ in encoder_block.SUPPORTED
        mixin = Fp8EncoderLayer if encoder else Fp8DecoderLayer
        body = {"__module__": original.__module__}
        _FP8_CLASSES[original] = type(f"Fp8{original.__name__}", (mixin, original), body)
    return _FP8_CLASSES[original]


def _summed(entries: dict[str, str]) -> list[tuple[str, str]]:
    """One line per run of numbered modules with the same text: ``layers.0-7``."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, text in entries.items():
        numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", name)
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", name, count=1)
        groups.setdefault((pattern, text), []).append(int(numbers[0]) if numbers else 0)
    lines = []
    for (pattern, text), numbers in groups.items():
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines.append((pattern.replace("{}", span, 1), text))
    return lines
