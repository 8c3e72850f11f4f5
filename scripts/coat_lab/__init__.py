"""Precision studies: what FP8 costs in training loss, and where."""

import coat_vlm  # noqa: F401 - before transformers, so that torchvision imports
