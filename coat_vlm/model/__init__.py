"""The composed vision-language model, registered with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from coat_vlm.model import packing
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import IMAGE_TOKEN, CoatVlmConfig, OpenClipVisionConfig
from coat_vlm.model.vlm import CoatVlm, count_parameters, module_parameters

__all__ = [
    "IMAGE_TOKEN",
    "CoatVlm",
    "CoatVlmConfig",
    "build_model",
    "count_parameters",
    "module_parameters",
]

AutoConfig.register(OpenClipVisionConfig.model_type, OpenClipVisionConfig, exist_ok=True)
AutoConfig.register(CoatVlmConfig.model_type, CoatVlmConfig, exist_ok=True)
AutoModel.register(CoatVlmConfig, CoatVlm, exist_ok=True)
AutoModelForImageTextToText.register(CoatVlmConfig, CoatVlm, exist_ok=True)
packing.register()
