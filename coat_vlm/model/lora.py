"""LoRA on the language model: peft's layers, and what their names and weights mean.

``add_adapters`` puts peft's layers around linear layers of the language model, in place. A layer
``q_proj`` with ``q_proj.weight`` then has ``q_proj.base_layer.weight`` [N, K], frozen, and
``q_proj.lora_A.default.weight`` [r, K] and ``q_proj.lora_B.default.weight`` [N, r], which train.
``separated`` undoes the names and ``merge`` the split: W + alpha / r * B A.

peft is imported where adapters are made: it is an extra, and a model without them needs none of it.
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
"""peft's name of a model's only adapter."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(model: CoatVlm, settings: LoraTraining) -> None:
    """Put adapters on the language model, in place; all other parameters are frozen.

    A is drawn from torch's global generator and B is zero, so the model computes what it did.

    Args:
        model: a model without adapters, not yet converted to FP8; on any device.
        settings: rank, scale, dropout and which layers.

    Raises:
        ValueError: a target is no linear layer of the language model, or peft is not installed.
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
        # The tower has layers of the same names, and the output layer stays as it is.
        target_modules=rf"{_LANGUAGE}\.(.*\.)?({'|'.join(map(re.escape, names))})",
    )
    peft.inject_adapter_in_model(config, model)


def _targets(model: CoatVlm, settings: LoraTraining) -> list[str]:
    """The last parts of the names of the layers that get an adapter."""
    output = model.get_output_embeddings()
    linears = {
        name.rpartition(".")[2]: None
        for name, module in model.language_model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    allowed = list(linears)
    if not allowed:
        raise ValueError(
            f"lora: {type(model.language_model).__name__} has no nn.Linear layer that could get an "
            "adapter; leave lora out of the stage"
        )
    for target in settings.targets or ():
        if target not in linears:
            close = difflib.get_close_matches(target, allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"lora.targets: {target!r} is no linear layer of "
                f"{type(model.language_model).__name__}'s blocks; allowed: {', '.join(allowed)}"
                f"{hint}"
            )
    return settings.targets or allowed


def has_adapters(module: nn.Module) -> bool:
    """Whether a layer in ``module`` has an adapter."""
    return any(base_layer(child) is not child for child in module.modules())


def base_layer(layer: nn.Module) -> nn.Module:
    """The layer that an adapter was put around; a layer without one itself."""
    return getattr(layer, "base_layer", layer) if hasattr(layer, "lora_A") else layer


def describe(model: CoatVlm) -> str:
    """One line on the adapters of a model: where they are, and how many parameters they have."""
    config = _config(model)
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
    """The configuration of a model's adapters for peft, as it is saved beside them.

    It names the folder that the model was loaded from, if there is one, and the other modules that
    train, which peft then keeps and loads whole (``modules_to_save``).
    """
    parts = {"vision_tower": model.vision_tower, "projector": model.projector}
    trained = [
        name
        for name, part in parts.items()
        if part is not None and count_parameters(part, trainable_only=True)
    ]
    return dataclasses.replace(
        _config(model),
        base_model_name_or_path=model.name_or_path or None,
        modules_to_save=trained or None,
        inference_mode=True,
    )


def _config(model: CoatVlm) -> Any:
    return vars(model)["peft_config"][_ADAPTER]


def separated(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model with adapters, by the names of the model without, and the adapters'.

    Args:
        state: names and tensors of a model that :func:`add_adapters` changed.

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
    """Add adapters to their base weights, W + scaling * B A, in FP32 and rounded once.

    Args:
        base: of :func:`separated`; weights with an adapter are replaced by the sum, in their dtype.
        adapters: likewise.
        scaling: alpha / r.
    """
    for name, a in adapters.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = base[f"{layer}.weight"]
            delta = scaling * (adapters[layer + _B].float() @ a.float())
            base[f"{layer}.weight"] = (weight.float() + delta).to(weight.dtype)
