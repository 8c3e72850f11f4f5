"""coat-vlm: train vision-language models, and know from evaluation that nothing was lost."""

from coat_vlm.torchvision_ops import ensure_torchvision_later

# transformers, timm and open_clip import torchvision: this must come before any of them.
ensure_torchvision_later()
