"""Optimizer parameter groups: one learning rate per module, weight decay on matrices only."""

from typing import Any

from torch import nn

from coat_vlm.config import StageConfig
from coat_vlm.model.vlm import CoatVlm, module_parameters


def param_groups(model: CoatVlm, stage: StageConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters, per module with and without weight decay.

    Norm weights, biases and embeddings are not decayed. Empty groups are left out, as ZeRO 1 and 2
    cannot partition them.

    Args:
        model: the model, with ``requires_grad`` already set for the stage.
        stage: learning rates and weight decay.

    Returns:
        Groups with ``params``, ``weight_decay``, ``lr`` (0: the loop sets it before every step),
        ``peak_lr`` and ``module``.
    """
    groups: list[dict[str, Any]] = []
    for name, part in module_parameters(model).items():
        embeddings = {
            id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)
        }
        decayed, plain = [], []
        for parameter in part.parameters():
            if parameter.requires_grad:
                is_matrix = parameter.ndim > 1 and id(parameter) not in embeddings
                (decayed if is_matrix else plain).append(parameter)
        for parameters, decay in ((decayed, stage.weight_decay), (plain, 0.0)):
            if parameters:
                groups.append(
                    {
                        "params": parameters,
                        "weight_decay": decay,
                        "lr": 0.0,
                        "peak_lr": stage.module(name).lr,
                        "module": name,
                    }
                )
    return groups
