"""The parameters of a model, by part."""

from torch import nn

from coat_vlm.config import ModuleName
from coat_vlm.model.vlm import CoatVlm


def module_parameters(model: CoatVlm) -> dict[ModuleName, nn.Module]:
    """The model's parts by the names that recipes use, those that it has."""
    parts: dict[ModuleName, nn.Module | None] = {
        "vision": model.vision_tower,
        "projector": model.projector,
        "language": model.language_model,
    }
    return {name: part for name, part in parts.items() if part is not None}


def count_parameters(module: nn.Module, trainable_only: bool = False) -> int:
    """Number of parameters, shared ones once; complete sizes also where ZeRO-3 has split them."""
    parameters = (p for p in module.parameters() if p.requires_grad or not trainable_only)
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
