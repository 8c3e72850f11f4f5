"""LoRA on the language model with peft's layers.

``add_adapters`` wraps linear layers of the language model in place. A layer ``q_proj`` with
``q_proj.weight`` then has the frozen ``q_proj.base_layer.weight`` [N, K], and the trained
``q_proj.lora_A.default.weight`` [r, K] and ``q_proj.lora_B.default.weight`` [N, r].
``split_adapters`` restores the original names; ``merge`` computes W + alpha / r * B A.

peft is imported only to create adapters, because it is an optional dependency.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from coat_vlm.config.stage import LoraTraining
from coat_vlm.model.vlm import CoatVlm, count_parameters

_LANGUAGE = "language_model"
_ADAPTER = "default"
"""peft's default adapter name."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(model: CoatVlm, settings: LoraTraining) -> None:
    """Add adapters to the language model in place, and freeze its other parameters.

    A is drawn from torch's global generator and B is zero, so the model's output is unchanged.

    Args:
        model: a model without adapters, not converted to FP8; on any device.
        settings: rank, scale, dropout and target layers.

    Raises:
        ValueError: a target is not a linear layer of the language model, or peft is missing.
    """
    names = _targets(model, settings)
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
        # Excludes the tower, which has layers with the same names, and the output layer.
        target_modules=rf"{_LANGUAGE}\.(.*\.)?({'|'.join(map(re.escape, names))})",
    )
    peft.inject_adapter_in_model(config, model)


def _targets(model: CoatVlm, settings: LoraTraining) -> list[str]:
    """Return the last name components of the layers to adapt."""
    output = model.get_output_embeddings()
    linears = {
        name.rpartition(".")[2]: None
        for name, module in model.language_model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    allowed = list(linears)
    if not allowed:
        raise ValueError(
            f"lora: {type(model.language_model).__name__} has no nn.Linear layer for an adapter; "
            "remove lora from the stage"
        )
    for target in settings.targets or ():
        if target not in linears:
            close = difflib.get_close_matches(target, allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"lora.targets: {target!r} is not a linear layer of "
                f"{type(model.language_model).__name__}'s blocks; allowed: {', '.join(allowed)}"
                f"{hint}"
            )
    return settings.targets or allowed


def has_adapters(module: nn.Module) -> bool:
    """Return whether a layer in ``module`` has an adapter."""
    return any(base_layer(child) is not child for child in module.modules())


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer that an adapter wraps; a layer without an adapter is returned itself."""
    return getattr(layer, "base_layer", layer) if hasattr(layer, "lora_A") else layer


def describe(model: CoatVlm) -> str:
    """Describe the adapters of a model in one line: layers and number of parameters."""
    config = vars(model)["peft_config"][_ADAPTER]
    layers = [name for name, m in model.named_modules() if base_layer(m) is not m]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    language = model.language_model
    trained = count_parameters(language, trainable_only=True)
    base = count_parameters(language) - trained
    return (
        f"LoRA rank {config.r}, alpha {config.lora_alpha}, dropout {config.lora_dropout:g} on "
        f"{len(layers)} layers ({', '.join(kinds)}): {trained:,} parameters, "
        f"{trained / base:.2%} of the language model, which is frozen"
    )


def adapter_config(model: CoatVlm) -> Any:
    """Create peft's configuration of a model's adapters, to save with the adapters.

    It names the folder from which the model was loaded, if any, and the other trained modules,
    whose full weights peft saves and loads (``modules_to_save``).
    """
    parts = {"vision_tower": model.vision_tower, "projector": model.projector}
    trained = [
        name
        for name, part in parts.items()
        if part is not None and count_parameters(part, trainable_only=True)
    ]
    return dataclasses.replace(
        vars(model)["peft_config"][_ADAPTER],
        base_model_name_or_path=model.name_or_path or None,
        modules_to_save=trained or None,
        inference_mode=True,
    )


def split_adapters(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into base weights, by their names without adapters, and adapter weights.

    Args:
        state: state dict of a model that :func:`add_adapters` changed.

    Returns:
        The base weights (``....q_proj.weight``), and ``....q_proj.lora_A.weight`` [r, K] and
        ``....q_proj.lora_B.weight`` [N, r].
    """
    base: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            adapters[name.replace(f".{_ADAPTER}.", ".")] = tensor
        else:
            base[name.replace(".base_layer.", ".")] = tensor
    return base, adapters


def merge(base: dict[str, Tensor], adapters: Mapping[str, Tensor], scaling: float) -> None:
    """Add adapters to their base weights, W + scaling * B A, in FP32 with one rounding.

    Args:
        base: base weights from :func:`split_adapters`; weights with an adapter are replaced by the
            sum, in their dtype.
        adapters: adapter weights from :func:`split_adapters`.
        scaling: alpha / r.
    """
    for name, a in adapters.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = base[f"{layer}.weight"]
            delta = scaling * (adapters[layer + _B].float() @ a.float())
            base[f"{layer}.weight"] = (weight.float() + delta).to(weight.dtype)
