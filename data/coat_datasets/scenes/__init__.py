"""A generated dataset: a few coloured shapes on a grid, captions and questions about them."""

from coat_datasets.scenes.make import make_scenes
from coat_datasets.scenes.scene import COLORS, HELD_OUT, POSITIONS, SHAPES, Scene, SceneObject

__all__ = ["COLORS", "HELD_OUT", "POSITIONS", "SHAPES", "Scene", "SceneObject", "make_scenes"]
