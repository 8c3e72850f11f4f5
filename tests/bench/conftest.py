"""Imported before the tests' modules, some of which begin with transformers."""

import coat_vlm  # noqa: F401 - first, so that torchvision imports
