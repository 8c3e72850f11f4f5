"""Estimates the GPU memory that a recipe needs, without a GPU: ``coat-vlm plan``."""

from coat_vlm.plan.stage import plan_recipe
from coat_vlm.plan.table import format_plan

__all__ = ["format_plan", "plan_recipe"]
