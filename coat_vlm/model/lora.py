"""LoRA with peft's layers, on the language model, the vision tower and the projector.

A wrapped layer ``q_proj`` has the frozen ``q_proj.base_layer.weight`` [N, K], and the trained
``q_proj.lora_A.default.weight`` [r, K] and ``q_proj.lora_B.default.weight`` [N, r]; with DoRA also
``q_proj.lora_magnitude_vector.default.weight`` [N]. peft is imported only to create adapters.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.config import ModuleName
from coat_vlm.config.stage import LoraTraining
from coat_vlm.model.vlm import count_parameters, module_parameters

_ADAPTER = "default"  # peft's default adapter name
_A, _B = ".lora_A.weight", ".lora_B.weight"
_IN_BLOCK = r"\.(.*\.)?\d+\.(.*\.)?"
_LENGTH = ".lora_magnitude_vector.weight"


def add_adapters(model: PreTrainedModel, settings: LoraTraining) -> None:
    """Add adapters in place to a model before its conversion to FP8; freeze all other parameters.

    A is drawn from torch's global generator and B is zero. Raises ValueError if peft is missing, or
    a target is not a linear layer of the modules.
    """
    targets = _find_targets(model, settings)
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ValueError(
            "a stage's lora section needs peft, which is not installed: pip install -e '.[lora]'"
        ) from error
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        target_modules=targets,
    )
    peft.inject_adapter_in_model(config, model)


def _find_targets(model: PreTrainedModel, settings: LoraTraining) -> str:
    parts = module_parameters(model)
    linears = {
        name: list(dict.fromkeys(_linears(name, parts[name], model)) if name in parts else ())
        for name in settings.modules
    }
    allowed = list(dict.fromkeys(layer for layers in linears.values() for layer in layers))
    for target in settings.target_modules or ():
        if target not in allowed and allowed:
            close = difflib.get_close_matches(target, allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            kinds = " and ".join(type(parts[name]).__name__ for name in settings.modules)
            raise ValueError(
                f"lora.target_modules: {target!r} is not a linear layer of {kinds}'s blocks; "
                f"allowed: {', '.join(allowed)}{hint}"
            )
    patterns = []
    for name in settings.modules:
        layers = linears[name]
        chosen = [layer for layer in layers if layer in (settings.target_modules or layers)]
        if not chosen:
            kind = type(parts[name]).__name__ if name in parts else "the model"
            wrong = "no nn.Linear layer for an adapter"
            wrong = f"none of lora.target_modules {settings.target_modules}" if layers else wrong
            raise ValueError(
                f"lora: {kind} ({name}) has {wrong}; remove {name} from lora.modules, or lora from "
                "the stage"
            )
        # Only within its module: a tower and a language model have layers of the same names.
        within = _IN_BLOCK if name == "vision" else r"\.(.*\.)?"
        own = "|".join(map(re.escape, cast(Any, model).part_names[name]))
        own = f"({own})" if "|" in own else own
        patterns.append(rf"{own}{within}({'|'.join(map(re.escape, chosen))})")
    unused = "|".join(map(re.escape, getattr(model, "unused", ())))
    pattern = "|".join(patterns)
    return rf"(?!({unused})(\.|$))({pattern})" if unused else pattern


def _split_lists(model: PreTrainedModel, name: str) -> list[str]:
    # peft does not save a list as a whole.
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.ModuleList):
        return [name]
    return [f"{name}.{number}" for number in range(len(module))]


def _linears(module: ModuleName, part: nn.Module, model: PreTrainedModel) -> Iterator[str]:
    output = model.get_output_embeddings()
    for name, layer in part.named_modules():
        # Subclasses belong to torch's attention module, which reads their weight without a call.
        # A tower's layers outside of blocks are a pooling head, which is not computed.
        in_block = module != "vision" or re.match(_IN_BLOCK, f".{name}")
        if type(layer) is nn.Linear and layer is not output and in_block:
            yield name.rpartition(".")[2]


def has_adapters(module: nn.Module) -> bool:
    """Return whether a layer in ``module`` has an adapter."""
    return any(base_layer(child) is not child for child in module.modules())


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer that an adapter wraps; a layer without an adapter is returned itself."""
    return getattr(layer, "base_layer", layer) if hasattr(layer, "lora_A") else layer


class Adapter(NamedTuple):
    """An adapter without dropout: adds scale * B A x to a layer's output."""

    a: nn.Parameter
    """[r, K]."""
    b: nn.Parameter
    """[N, r]."""
    scale: float


def find_adapter(layer: nn.Module) -> Adapter | None:
    """Return a layer's active adapter, or None; ValueError if it is more than :class:`Adapter`."""
    wrapper: Any = layer
    active = _active_adapters(layer)
    if not active or wrapper.disable_adapters or wrapper.merged:
        return None
    if not is_plain(layer):
        raise ValueError(
            f"a {type(layer).__name__} of an FP8 block has dropout, DoRA, a bias or several active "
            "adapters, which FP8 blocks do not compute: wrap the layers first "
            "(peft.get_peft_model), then convert the model"
        )
    (name,) = active
    return Adapter(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer's active adapters are at most one :class:`Adapter`."""
    wrapper: Any = layer
    active = _active_adapters(layer)
    return len(active) < 2 and all(
        isinstance(wrapper.lora_A[name], nn.Linear)  # AdaLoRA's is a parameter
        and type(wrapper.lora_dropout[name]) is nn.Identity
        and wrapper.lora_B[name].bias is None
        and not reads_base_weight(layer)
        for name in active
    )


def reads_base_weight(layer: nn.Module) -> bool:
    """Return whether an adapter computes with the base weight itself, as DoRA does."""
    return bool(getattr(layer, "lora_variant", None)) or bool(
        len(getattr(layer, "lora_magnitude_vector", ()))
    )


def _active_adapters(layer: nn.Module) -> list[str]:
    wrapper: Any = layer
    if not hasattr(layer, "lora_A"):
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def describe(model: PreTrainedModel) -> str:
    """Describe the adapters of a model in one line."""
    config = vars(model)["peft_config"][_ADAPTER]
    layers = [name for name, m in model.named_modules() if base_layer(m) is not m]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    parts = [part for part in module_parameters(model).values() if has_adapters(part)]
    trained = sum(count_parameters(part, trainable_only=True) for part in parts)
    share = trained / (sum(map(count_parameters, parts)) - trained)
    variant = "DoRA" if config.use_dora else "LoRA"
    return (
        f"{'rs' * config.use_rslora}{variant} rank {config.r}, alpha {config.lora_alpha}, dropout "
        f"{config.lora_dropout:g} on {len(layers)} layers ({', '.join(kinds)}): {trained:,} "
        f"parameters, {share:.2%} of the frozen ones"
    )


def adapter_config(model: PreTrainedModel) -> Any:
    """Create peft's configuration of a model's adapters, with base and other trained modules."""
    trained = [
        module
        for name, part in module_parameters(model).items()
        if count_parameters(part, trainable_only=True) and not has_adapters(part)
        for whole in cast(Any, model).part_names[name]
        for module in _split_lists(model, whole)
    ]
    return dataclasses.replace(
        vars(model)["peft_config"][_ADAPTER],
        base_model_name_or_path=model.name_or_path or None,
        modules_to_save=trained or None,
        inference_mode=True,
    )


def split_adapters(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into base weights (``....q_proj.weight``) and adapter weights.

    Adapters are called ``....q_proj.lora_A.weight``, as in peft's files.
    """
    base: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            adapters[name.replace(f".{_ADAPTER}.", ".")] = tensor
        else:
            base[name.replace(".base_layer.", ".")] = tensor
    return base, adapters


def find_scale(config: Mapping[str, Any]) -> float:
    """Return the scale of B A from the contents of adapter_config.json."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merge(base: dict[str, Tensor], adapters: Mapping[str, Tensor], scaling: float) -> None:
    """Add adapters of :func:`split_adapters` to their base weights in place, in FP32, rounded once.

    With DoRA, the rows of the sum are scaled to the magnitudes m [N] (peft, tuners/lora/dora.py).
    """
    for name, a in adapters.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = base[f"{layer}.weight"]
            merged = weight.float() + scaling * (adapters[layer + _B].float() @ a.float())
            if layer + _LENGTH in adapters:
                lengths = adapters[layer + _LENGTH].float()
                merged *= (lengths / merged.norm(dim=1))[:, None]
            base[f"{layer}.weight"] = merged.to(weight.dtype)
