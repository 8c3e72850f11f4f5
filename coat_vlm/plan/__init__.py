"""Estimates the GPU memory that a recipe needs, without a GPU: ``coat-vlm plan``."""

from coat_vlm.plan.fit import adopt_choices, fit_recipe
from coat_vlm.plan.stage import plan_recipe
from coat_vlm.plan.table import format_plan

__all__ = ["adopt_choices", "fit_recipe", "format_plan", "plan_recipe"]
