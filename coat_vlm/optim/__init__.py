"""The optimizer with FP8 states, parameter groups and learning rate schedules."""

from coat_vlm.optim.adamw import CoatAdamW
from coat_vlm.optim.groups import lr_factor, param_groups

__all__ = ["CoatAdamW", "lr_factor", "param_groups"]
