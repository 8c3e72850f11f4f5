"""Parameter groups and learning rate schedules."""

from coat_vlm.optim.groups import param_groups
from coat_vlm.optim.schedule import lr_factor

__all__ = ["lr_factor", "param_groups"]
