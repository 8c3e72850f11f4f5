"""Applies a ``precision``: dtype of weights, and conversion to FP8 (families: ``blocks.py``).

    report = convert(model, Fp8Config())
    print(report)

:func:`convert` replaces the class of a block in place with a subclass that has another forward
pass, so ``state_dict``, ``save_pretrained``, ``generate`` and gradient checkpointing work as in the
original model.

:class:`Arithmetic` is a precision on a device. On a GPU, all precisions except ``fp32`` have BF16
weights (master weights are FP32). On a CPU, which emulates BF16 ten times slower, weights are FP32
(BF16 with ``master_weights: low_bits``), and only linear layers round: ``bf16`` rounds the operands
and the result of every linear layer to BF16; the FP8 precisions run the reference arithmetic of the
FP8 blocks, BF16 forward GEMMs in FP32, and round other linear layers like ``bf16``.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from coat_kernels import GEMM_MULTIPLE
from coat_kernels.formats import check_group, pad_length
from coat_vlm.config import Fp8Config, Precision, Recipe
from coat_vlm.fp8.blocks import FP8_LAYERS, Fp8Encoder, Fp8Layer, activation_of, find_layer
from coat_vlm.fp8.experts import check_experts
from coat_vlm.fp8.linear import Fp8Linear
from coat_vlm.fp8.output_layer import Fp8Gradients
from coat_vlm.fp8.weights import is_stored, restore_weight, store_experts, store_weights
from coat_vlm.model.configuration import count_needed_layers
from coat_vlm.model.lora import base_layer, has_adapters, is_plain, reads_base_weight
from coat_vlm.model.loss import FP8_GRADIENTS

logger = logging.getLogger(__name__)

Part = Literal["vision", "language"]

PROJECTORS = {
    *("projector", "multi_modal_projector", "connector", "merger", "deepstack_merger_list"),
    "embed_vision",
}
"""Names of modules between tower and language model: ``fp8.projector`` is for their layers."""

MIN_BLOCKS = 6
"""Blocks of a part of which the first and the last have BF16 forward GEMMs by default."""

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada; Hopper has 9.0)."""


@dataclass(slots=True)
class ConversionReport:
    """Result of :func:`convert`."""

    converted: dict[str, str] = field(default_factory=dict)
    """Module name -> description of the conversion."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name -> why it was not converted."""

    def __str__(self) -> str:
        lines = [f"FP8: {len(self.converted)} modules converted, {len(self.skipped)} left"]
        lines += _summarize(self.converted, "")
        lines += _summarize(self.skipped, "left, ")
        return "\n".join(lines)


def _summarize(entries: dict[str, str], prefix: str) -> list[str]:
    """Return one line per run of numbered modules with the same text: ``layers.0-7``."""
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
    """Convert the blocks of known families (:mod:`coat_vlm.fp8.blocks`) that ``config`` selects.

    The report lists every module with a weight matrix that is not part of a block.

    Raises:
        ValueError: a selected part has no block of a known family, a shape does not fit an FP8
            GEMM, or the group size does not divide. The model is then unchanged.
    """
    config = config.resolved("coat")
    report = ConversionReport()
    blocks: dict[Part, list[tuple[str, nn.Module]]] = {"vision": [], "language": []}
    for name, module in model.named_modules():
        mixin = find_layer(module)
        if mixin is not None:
            part: Part = "vision" if issubclass(mixin, Fp8Encoder) else "language"
            blocks[part].append((name, module))
    in_bf16 = _choose_bf16(model, config, blocks)
    chosen: dict[Part, list[tuple[Any, str, bool]]]
    chosen = {part: list(_choose(part, of, config, in_bf16, report)) for part, of in blocks.items()}
    linears: list[Any] = list(_choose_linears(model, config, report))
    _check_parts(model, config, blocks)
    _list_rest(model, [block for of in blocks.values() for _, block in of], report)
    for block, precision, bf16_forward in chosen["vision"] + chosen["language"]:
        layers: list[Any] = list(_linears_of(block).values())
        if precision == "fp8_linear":
            linears += filter(_fits_gemm, layers)
            continue
        for layer in layers:
            layer.fp8_bf16_forward = bf16_forward
        block.__class__ = _fp8_class(find_layer(block) or Fp8Layer, type(block))
        block.fp8_group_size = config.group_size
    for layer in linears:
        layer.__class__ = Fp8Linear
        layer.fp8_bf16_forward = False
        layer.fp8_key = object()  # shared by shallow copies (in the loss), not by deep copies
    if config.recompute_qkv is True:
        recompute_qkv(model)
    return report


def recompute_qkv(model: nn.Module) -> int:
    """Compute q, k and v again in backward from now on; return the number of blocks that do.

    Blocks with BF16 forward GEMMs cannot, as their results do not follow from the saved FP8 inputs.
    """
    chosen: list[Any] = [
        block
        for _, block in fp8_blocks(model)
        if not next(iter(_linears_of(block).values())).fp8_bf16_forward
    ]
    for block in chosen:
        block.fp8_recompute_qkv = True
    return len(chosen)


def _choose_bf16(
    model: Any, config: Fp8Config, blocks: dict[Part, list[tuple[str, nn.Module]]]
) -> set[str]:
    """Return the names of the blocks that ``config`` gives BF16 forward GEMMs.

    ValueError: no block with a given name becomes an FP8 block.
    """
    chosen, allowed = set[str](), list[str]()
    for part, of in blocks.items():
        names = [name for name, _ in of]
        allowed += names if getattr(config, part) == "coat" else []
        last_used = getattr(getattr(model, "config", None), "vision_feature_layer", None)
        if part == "vision" and names and isinstance(last_used, int):
            names = names[: count_needed_layers(len(names), last_used)]
        words = {"first": names[:1], "last": names[-1:], "all": names}
        given = config.bf16_forward
        if given is None:
            given = ("first", "last") if len(names) >= MIN_BLOCKS else ()
        chosen.update(name for word in given for name in words.get(word, [word]))
    wrong = sorted({*(config.bf16_forward or ())}.difference(("first", "last", "all"), allowed))
    if wrong and allowed:
        raise ValueError(
            f"fp8.bf16_forward: {wrong[0]!r} does not become an FP8 block; allowed: first, "
            f"last, all, and blocks from {allowed[0]} to {allowed[-1]}"
        )
    return chosen


def _choose(
    part: Part,
    blocks: Sequence[tuple[str, Any]],
    config: Fp8Config,
    in_bf16: set[str],
    report: ConversionReport,
) -> Iterator[tuple[Any, str, bool]]:
    """Yield blocks to convert, their precision, and whether their forward GEMMs are BF16."""
    selected: str = getattr(config, part)
    description = f"FP8 {'encoder' if part == 'vision' else 'decoder'} block"
    for name, block in blocks:
        if selected == "bf16":
            report.skipped[name] = f"fp8.{part} is bf16"
            continue
        precision, bf16_forward = selected, name in in_bf16
        exception = ", forward GEMMs in BF16" if bf16_forward else ""
        note = (find_layer(block) or Fp8Layer).NOTE
        if has_adapters(block) and selected != "fp8_linear" and all(map(is_plain, block.modules())):
            text = f"{description}{note}, frozen, with LoRA adapters in BF16{exception}"
        elif has_adapters(block):
            precision = "fp8_linear"
            instead = f", not {selected}: of lora, dropout or dora" if selected != precision else ""
            text = f"frozen linear layers in FP8, LoRA adapters in BF16{instead}"
        elif selected == "fp8_linear":
            text = "linear layers in FP8"
        else:
            text = description + note + exception
        _check_block(name, block, None if precision == "fp8_linear" else config)
        report.converted[name] = text
        if precision == "fp8_linear":
            report.skipped |= {
                f"{name}.{child}": f"its width is not a multiple of {GEMM_MULTIPLE}"
                for child, layer in _linears_of(block).items()
                if not _fits_gemm(layer)
            }
        yield block, precision, bf16_forward


def _linears_of(block: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a block by name; for LoRA adapters, the frozen base layer."""
    mixin: Any = find_layer(block) or block  # a converted block also has the names
    return {name: base_layer(block.get_submodule(name)) for name in mixin.LINEARS}


def _modules_of(blocks: Sequence[Any]) -> Iterator[nn.Module]:
    """Yield what blocks compute themselves: their linear layers, with the adapters of these."""
    for block in blocks:
        mixin: Any = find_layer(block) or block
        for name in (*mixin.LINEARS, *filter(None, [mixin.EXPERTS])):
            yield from block.get_submodule(name).modules()


def store_frozen_weights(model: nn.Module, device: torch.device | None = None) -> None:
    """Store the frozen weights of FP8 blocks only in FP8 (``weights.py``).

    Blocks whose forward GEMMs are BF16 keep theirs. The stored weights go to ``device``, by default
    the weights'. Call it again after a change of the original weights, which are on the CPU from
    then on, and then :func:`graph_blocks`, whose graphs read what was stored before. Experts are
    stored only in blocks with LoRA adapters. Weights that DeepSpeed's ZeRO-3 partitions, and those
    that an adapter reads itself (DoRA), are left.
    """
    for block in model.modules():
        whole = _is_converted(block)
        known = whole or find_layer(block) is not None
        if not known or any(map(reads_base_weight, block.modules())):
            continue
        groups: dict[str, list[Any]] = {}
        linears = _linears_of(block)
        parents = [name.rpartition(".")[0] for name in linears]
        for number, (name, layer) in enumerate(linears.items()):
            # The layers of a parent have the same input, except for the last, its output layer.
            together = whole and parents[number + 1 : number + 2] == [parents[number]]
            groups.setdefault(parents[number] if together else name, []).append(layer)
        for layers in groups.values():
            in_fp8 = (whole or isinstance(layers[0], Fp8Linear)) and not layers[0].fp8_bf16_forward
            frozen = not any(layer.weight.requires_grad for layer in layers)
            partitioned = any(hasattr(layer.weight, "ds_id") for layer in layers)
            if in_fp8 and frozen and not partitioned:
                store_weights(layers, device)
        # Without adapters frozen experts compute in BF16, as trained ones do.
        experts = _experts_of(block) if whole and has_adapters(block) else None
        own = () if experts is None else experts.parameters()
        if experts and not any(p.requires_grad or hasattr(p, "ds_id") for p in own):
            store_experts(experts, device)


def _experts_of(block: nn.Module) -> nn.Module | None:
    """Return the experts of a block; ValueError if it has an MLP where others have experts."""
    mixin: Any = find_layer(block) or block
    if mixin.EXPERTS is None:
        return None
    experts = getattr(block.get_submodule(mixin.EXPERTS), "experts", None)
    if experts is None:
        raise ValueError(
            f"a {type(block).__name__} has no experts (mlp_only_layers or decoder_sparse_step in "
            "config.json), and FP8 supports only layers with experts: set fp8.language: bf16"
        )
    return experts


def _choose_linears(
    model: nn.Module, config: Fp8Config, report: ConversionReport
) -> Iterator[nn.Linear]:
    """Yield single linear layers to convert: the projector's and the output layer."""
    for name, module in model.named_modules():
        *holders, last = name.split(".")
        in_projector = not PROJECTORS.isdisjoint(holders)
        if type(module) is not nn.Linear or not (in_projector or last == "lm_head"):
            continue
        key = "projector" if in_projector else "lm_head"
        precision = getattr(config, key)
        plain = _fits_gemm(module) and module.bias is None
        converted = precision == "fp8_gradients" and plain
        setattr(module, FP8_GRADIENTS, Fp8Gradients if converted else None)
        if precision == "fp8_linear":
            _check_linear(name, module.out_features, module.in_features)
            report.converted[name] = "FP8 linear"
            yield module
        elif precision == "bf16":
            report.skipped[name] = f"fp8.{key} is bf16"
        elif plain:
            report.converted[name] = "output layer, BF16 logits, FP8 gradients in the fused loss"
        else:
            report.skipped[name] = f"a bias, or sizes that are not multiples of {GEMM_MULTIPLE}"


def _list_rest(model: nn.Module, blocks: Sequence[nn.Module], report: ConversionReport) -> None:
    """Add modules with a weight matrix outside of ``blocks`` to ``report.skipped``."""
    inside = set(map(id, _modules_of(blocks)))
    for name, module in model.named_modules():
        known = id(module) in inside or name in report.converted or name in report.skipped
        if known or isinstance(module, nn.Embedding):
            continue
        parameters = module.parameters(recurse=False)
        if isinstance(module, nn.Linear | _ConvNd) or any(p.ndim == 2 for p in parameters):
            report.skipped[name] = f"{type(module).__name__} outside of the FP8 blocks"


def _check_parts(
    model: nn.Module, config: Fp8Config, blocks: dict[Part, list[tuple[str, nn.Module]]]
) -> None:
    """Raise an error if ``config`` selects a part that has nothing to convert."""
    attributes = {"vision": "vision_tower", "language": "language_model"}
    composed = all(hasattr(model, name) for name in attributes.values())
    names = dict.fromkeys(name for layer in FP8_LAYERS for name in layer.ORIGINALS)
    known = f"block that FP8 supports; supported: {', '.join(names)}"
    for part, of_part in blocks.items():
        # A composed model without a tower has None.
        expected = composed and getattr(model, attributes[part]) is not None
        if expected and not of_part and getattr(config, part) != "bf16":
            raise ValueError(
                f"the {part} model has no {known}: set fp8.{part}: bf16, or use precision bf16"
            )
    if not any(blocks.values()):
        raise ValueError(f"{type(model).__name__} has no {known}")


def _check_block(name: str, block: nn.Module, config: Fp8Config | None) -> None:
    """Check that kernels support a block's shapes and, with a configuration, its activation."""
    linears, experts = _linears_of(block), _experts_of(block)
    if config is not None and experts is not None:
        check_experts(name, experts, config.group_size)
    first, last = next(iter(linears)), next(reversed(linears))
    some_fit = any(map(_fits_gemm, linears.values()))
    attention = first.rpartition(".")[0]
    fused = next((name for name in linears if name.endswith("gate_up_proj")), None)
    for child, layer in linears.items():
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{name}.{child} is a {type(layer).__name__}; an FP8 block reads the weights of "
                "plain nn.Linear layers and would bypass this layer: convert before wrapping "
                "layers in anything but peft's LoRA, or leave this part out"
            )
        if config is None and some_fit:  # the others stay as they are
            continue
        N, K = layer.out_features, layer.in_features
        if child == fused:
            N //= 2
        elif config is not None and not child.startswith(f"{attention}.") and fused is None:
            # mlp.py pads the width of h.
            N, K = (N, pad_length(K)) if child == last else (pad_length(N), K)
        _check_linear(f"{name}.{child}", N, K)
        if config is not None:
            check_group(f"{name}.{child}", K, config.group_size)
    activation = activation_of(block.get_submodule(attention))
    allowed = (find_layer(block) or Fp8Layer).ACTIVATIONS
    if config is not None and activation not in allowed:
        raise ValueError(
            f"{name}: hidden_act {activation!r} has no FP8 kernel; allowed here: "
            f"{', '.join(allowed)}: leave this part out (fp8.vision or fp8.language: bf16), or "
            "use fp8_linear"
        )


def _fits_gemm(layer: Any) -> bool:
    return not (layer.in_features % GEMM_MULTIPLE or layer.out_features % GEMM_MULTIPLE)


def _check_linear(name: str, N: int, K: int) -> None:
    if K % GEMM_MULTIPLE or N % GEMM_MULTIPLE:
        raise ValueError(
            f"{name}: weight [N, K] = [{N}, {K}]; FP8 GEMMs take multiples of {GEMM_MULTIPLE}: "
            "change the layer's width, or leave this part in BF16 (fp8.vision, fp8.language, "
            "fp8.projector or fp8.lm_head: bf16)"
        )


@cache
def _fp8_class(mixin: type[Fp8Layer], original: type[nn.Module]) -> type[nn.Module]:
    """Return the FP8 subclass, cached so that equal layers have equal classes."""
    name = f"Fp8{original.__name__}"
    return type(name, (mixin, original), {"__module__": original.__module__})


def fp8_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the converted blocks with their names."""
    return [(name, module) for name, module in model.named_modules() if _is_converted(module)]


def _is_converted(module: Any) -> bool:
    return isinstance(module, Fp8Layer)


def back_to_bf16(block: nn.Module, round_linears: bool) -> None:
    """Revert a block's conversion in place; ``round_linears`` as in :class:`Arithmetic`."""
    modules: list[Any] = list(block.modules())
    if _is_converted(block):
        modules[0].__class__ = type(block).__bases__[1]  # after the mixin
    for layer in modules:
        restore_weight(layer)
        if type(layer) in (nn.Linear, Fp8Linear):
            layer.__class__ = Bf16RoundedLinear if round_linears else nn.Linear


class Bf16RoundedLinear(nn.Linear):
    """A linear layer that rounds operands, result and their gradients to BF16."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the input's dtype."""
        return _round(F.linear(_round(input), _round(self.weight), self.bias))


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A precision on a device."""

    dtype: torch.dtype
    """Dtype of the weights."""
    fp8: Fp8Config | None = None
    """What is converted to FP8."""
    round_linears: bool = False
    """Round the operands of the remaining linear layers to BF16 (on a CPU)."""
    low_bits: bool = False
    """The optimizer has the low 16 bits of the master weights (``master_weights: low_bits``)."""

    @property
    def fp32_copy(self) -> bool:
        """Whether there are FP32 copies of BF16 weights, as master weights."""
        return self.dtype == torch.bfloat16 and not self.low_bits

    def apply(self, model: nn.Module) -> ConversionReport | None:
        """Convert the model's layers in place; returns the report, or None without FP8."""
        report = None if self.fp8 is None else convert(model, self.fp8)
        if self.round_linears:
            inside = set(map(id, _modules_of([block for _, block in fp8_blocks(model)])))
            for module in model.modules():
                if type(module) is nn.Linear and id(module) not in inside:
                    module.__class__ = Bf16RoundedLinear
        return report


def count_fp8_weights(model: nn.Module) -> int:
    """Count the weights that FP8 GEMMs quantize in every pass: not those stored in FP8."""
    linears = {id(m): m for m in model.modules() if isinstance(m, Fp8Linear)}
    for _, block in fp8_blocks(model):
        of_block: list[Any] = list(_linears_of(block).values())
        linears |= {id(m): m for m in of_block}
    # Under ZeRO-3 a rank holds a shard of a weight.
    weights = [m.weight for m in linears.values() if not is_stored(m)]
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)


def find_gpu_problem() -> str | None:
    """Return why this machine's GPU cannot run the project's Triton kernels, or None if it can."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return (
        f"this is an AMD GPU (torch for ROCm {torch.version.hip}), and the Triton kernels of FP8 "
        "and of the loss contain NVIDIA's assembly (PTX), which would abort the process: train on "
        "an NVIDIA GPU, or on the CPU (HIP_VISIBLE_DEVICES=-1)"
    )


@cache
def _warn_of_gpu(major: int, minor: int) -> None:
    """Log once if FP8 was not tested on a GPU."""
    if major != 9:
        text = (
            "compute capability %d.%d: FP8 was tested on 9.0, docs/guides/fp8.md says what differs"
        )
        logger.warning(text, major, minor)


def arithmetic_of(
    precision: Precision, fp8: Fp8Config | None, device: torch.device, *, low_bits: bool = False
) -> Arithmetic:
    """Return the arithmetic on a device; ``meta`` means a GPU with FP8 tensor cores.

    Raises ValueError if the GPU has none.
    """
    if precision == "fp32":
        return Arithmetic(torch.float32)
    in_bf16 = low_bits or device.type in ("cuda", "meta")
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    if precision == "bf16":
        return Arithmetic(dtype, round_linears=not in_bf16)
    settings = (fp8 or Fp8Config()).resolved(precision)
    if device.type == "cuda":
        problem = find_gpu_problem()
        if problem is not None:
            raise ValueError(problem)
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            needed, actual = ("{}.{}".format(*version) for version in (FP8_CAPABILITY, capability))
            raise ValueError(
                f"an FP8 precision needs FP8 tensor cores, compute capability {needed} or newer "
                f"(Ada, Hopper); this GPU has {actual}: train with precision=bf16"
            )
        _warn_of_gpu(*capability)
    return Arithmetic(dtype, settings, round_linears=not in_bf16, low_bits=low_bits)


def arithmetic_of_recipe(recipe: Recipe, device: torch.device) -> Arithmetic:
    """Return :func:`arithmetic_of` a recipe, which resolves ``master_weights: auto``."""
    low_bits = recipe.has_low_bits(gpu=device.type != "cpu")
    return arithmetic_of(recipe.precision, recipe.fp8, device, low_bits=low_bits)
