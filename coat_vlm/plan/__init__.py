"""What a recipe needs of a GPU's memory, told before any GPU is touched: ``coat-vlm plan``."""

from coat_vlm.plan.activations import Activations, LiveMemory, trace
from coat_vlm.plan.stage import StagePlan, plan_recipe
from coat_vlm.plan.table import format_plan
from coat_vlm.plan.zero import ZERO_STAGES, RankMemory, Sizes, rank_memory

__all__ = [
    "ZERO_STAGES",
    "Activations",
    "LiveMemory",
    "RankMemory",
    "Sizes",
    "StagePlan",
    "format_plan",
    "plan_recipe",
    "rank_memory",
    "trace",
]
