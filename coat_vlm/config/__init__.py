"""Recipes: one YAML file, read into frozen dataclasses; unknown keys are errors.

A recipe contains the model, the data of each stage and the training settings of each stage.
:func:`coat_vlm.config.load.load_recipe` reads a file (or a built-in recipe by name), applies dotted
overrides such as ``stages.sft.max_steps=10`` and returns a :class:`Recipe`. This package imports no
other package of the project.
"""

from coat_vlm.config.fp8 import Fp8Config, Precision
from coat_vlm.config.model import ImageConfig, LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.recipe import Recipe
from coat_vlm.config.stage import (
    MODULES,
    STAGES,
    ModuleName,
    ModuleTraining,
    SourceConfig,
    StageConfig,
    StageName,
)

__all__ = [
    "MODULES",
    "STAGES",
    "Fp8Config",
    "ImageConfig",
    "LanguageConfig",
    "ModelConfig",
    "ModuleName",
    "ModuleTraining",
    "Precision",
    "Recipe",
    "SourceConfig",
    "StageConfig",
    "StageName",
    "VisionConfig",
]
