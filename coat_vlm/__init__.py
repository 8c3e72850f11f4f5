"""coat-vlm: trains vision-language models in FP8 and evaluates them."""

import subprocess
from pathlib import Path

from coat_vlm.auto_classes import register_auto_classes
from coat_vlm.torchvision_ops import ensure_torchvision_later

# Must run before the first import of transformers, timm or open_clip: they import torchvision.
ensure_torchvision_later()
register_auto_classes()


def commit() -> str | None:
    """Return the git commit of this checkout, with ``-dirty`` after local changes.

    Returns None for an installed copy, or without git.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
