"""Registers the model, its configurations and its processor with transformers' Auto classes.

The Auto classes have tables of class names, and import ``transformers.models.<model type>`` when a
class is first used. This module adds names to these tables, and :mod:`coat_vlm.model` under the
names of such modules. ``AutoModel.register`` and its siblings take classes, which would import
torch and transformers with each ``import coat_vlm``.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto."
_CONFIGS = {"coat_vlm": "CoatVlmConfig", "coat_open_clip_vision": "OpenClipVisionConfig"}
_MODEL = {"coat_vlm": "CoatVlm"}
_TABLES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    f"{_AUTO}configuration_auto": {"CONFIG_MAPPING_NAMES": _CONFIGS},
    f"{_AUTO}modeling_auto": {
        "MODEL_MAPPING_NAMES": _MODEL,
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": _MODEL,
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": _MODEL,
    },
    f"{_AUTO}processing_auto": {"PROCESSOR_MAPPING_NAMES": {"coat_vlm": "CoatVlmProcessor"}},
}
"""Module of transformers -> its table of names -> model type -> class."""


class _AfterAutoModules(MetaPathFinder):
    """An import hook that adds names to the modules of ``_TABLES`` when they have been imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _TABLES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add_names(module)

            spec.loader.exec_module = execute_and_add
        return spec


def register_auto_classes() -> None:
    """Register with transformers, without importing it; again has no effect."""
    if any(isinstance(finder, _AfterAutoModules) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _AfterAutoModules())
    for name in _TABLES:
        if name in sys.modules:
            _add_names(sys.modules[name])


def _add_names(auto_module: ModuleType) -> None:
    for table_name, classes in _TABLES[auto_module.__name__].items():
        table = getattr(auto_module, table_name)
        table.update(classes)
        # Exists only in tables of models and processors. It inverted the table of
        # configurations when it was made, which lacks ours if transformers was imported first.
        lazy = getattr(table, "_model_mapping", None)
        if lazy is not None:
            lazy._reverse_config_mapping |= {config: kind for kind, config in _CONFIGS.items()}
    # Programs such as TRL look up the class that config.json names in transformers itself.
    lazy_classes = sys.modules["transformers"]._class_to_module
    lazy_classes.update(dict.fromkeys(_MODEL.values(), "models.coat_vlm"))
    for model_type in _CONFIGS:
        models = importlib.import_module("coat_vlm.model")
        sys.modules.setdefault(f"transformers.models.{model_type}", models)
