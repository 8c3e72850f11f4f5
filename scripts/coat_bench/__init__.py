"""Measurements of speed and memory, ours beside baselines; results stand in docs/results.md."""

import coat_vlm  # noqa: F401 - before transformers and DeepSpeed, so that torchvision imports
