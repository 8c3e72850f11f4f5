"""Recipes: one YAML file, read into frozen dataclasses; unknown keys are errors.

A recipe contains the model, the data of each stage and the training settings of each stage.
:func:`coat_vlm.config.load.load_recipe` reads a file (or a built-in recipe by name), applies dotted
overrides such as ``stages.sft.max_steps=10`` and returns a :class:`Recipe`. This package imports no
other package of the project.
"""

from coat_vlm.config.fp8 import (
    FP8_PRECISIONS,
    BlockPrecision,
    CudaGraphs,
    Fp8Config,
    Fp8Precision,
    MasterWeights,
    Precision,
)
from coat_vlm.config.model import (
    ImageConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorConfig,
    TokenizerConfig,
    VideoConfig,
    VisionConfig,
)
from coat_vlm.config.recipe import Recipe, TrackingConfig
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
    "FP8_PRECISIONS",
    "MODULES",
    "STAGES",
    "BlockPrecision",
    "CudaGraphs",
    "Fp8Config",
    "Fp8Precision",
    "ImageConfig",
    "LanguageConfig",
    "MasterWeights",
    "ModelConfig",
    "ModuleName",
    "ModuleTraining",
    "Precision",
    "ProjectorConfig",
    "Recipe",
    "SourceConfig",
    "StageConfig",
    "StageName",
    "TokenizerConfig",
    "TrackingConfig",
    "VideoConfig",
    "VisionConfig",
]
