"""Benchmarks of speed and memory, compared with baselines; docs/results.md has the results."""

import coat_vlm  # noqa: F401 - before transformers and DeepSpeed, so that torchvision imports
