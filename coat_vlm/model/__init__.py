"""The composed vision-language model, its configuration and its processor.

Classes are imported when they are first used: transformers' Auto classes, which find them here
(:mod:`coat_vlm.auto_classes`), ask only for the configuration to read a config.json.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coat_vlm.model.build import build_model
    from coat_vlm.model.configuration import CoatVlmConfig, OpenClipVisionConfig
    from coat_vlm.model.processor import CoatVlmProcessor
    from coat_vlm.model.vlm import CoatVlm

__all__ = ["CoatVlm", "CoatVlmConfig", "CoatVlmProcessor", "OpenClipVisionConfig", "build_model"]

_MODULES = {
    "CoatVlm": "vlm",
    "CoatVlmConfig": "configuration",
    "CoatVlmProcessor": "processor",
    "OpenClipVisionConfig": "configuration",
    "build_model": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
