"""A generated data set: a few colored shapes on a grid, with captions and questions."""

from coat_datasets.scenes.make import make_scenes

__all__ = ["make_scenes"]
